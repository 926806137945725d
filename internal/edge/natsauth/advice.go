package natsauth

// NoJetStream returns the event and the remedy for the log line of a program that waits for the JetStream of a NATS
// server.
func NoJetStream() (event, todo string) {
	return "waiting for JetStream; NATS answers, but its JetStream does not",
		"start the missing NATS servers: more than half of those with JetStream must be up"
}

// Package client queries kvatlas: it returns the inference workers that hold the most blocks of a prompt.
//
// A [Client] sends requests over NATS, on a connection of the program, or over HTTP:
//
//	c, err := client.NATS(conn, "default", client.Options{})
//	c, err := client.HTTP([]string{"http://127.0.0.1:8090"}, client.Options{})
//
// All methods, answers and errors are the same over NATS and HTTP:
//
//	answer, err := c.Find(ctx, &api.Query{Model: "llama", Tokens: tokens})
//	list, err := c.Workers(ctx)
//	status, err := c.Status(ctx)
//
// Package api defines the queries, answers and errors.
//
// # Deadlines and retries
//
// A request carries the deadline of the context. The default is 5 s. Find, Workers, Status and StatusOf have no
// effects, so the client retries these requests within the deadline:
//
//   - If the connection is lost or not yet established, the client pauses for 20 to 250 ms before a retry.
//   - If no node serves the request, or the node is unavailable (503), the client pauses in the same way. It returns
//     the error after [Options.Absent] or half of the deadline.
//   - If no answer arrives within HedgeAfter, usually 250 ms, or a quarter of the deadline, the client sends a second
//     request beside the first (a hedged request). The wait before a further hedged request doubles. At most a tenth of
//     all requests are hedged, or ten per second if that is more, and a hundred at once after a time without hedging. A
//     Select is never hedged, since every copy would take a place in the queue of a busy fleet.
//
// The client returns the first answer. It retries requests with other effects, such as a Verify, a Snapshot and a
// booking, only if no node has received the request.
//
// # Errors
//
// Every error is or wraps an [*api.Error], except the error of a cancelled context. The code decides the reaction:
//
//	switch client.CodeOf(err) {
//	case api.CodeUnknownModel: // no worker serves the model
//	case api.CodeBusy, api.CodeNotReady, api.CodeUnavailable: // retry later
//	}
package client

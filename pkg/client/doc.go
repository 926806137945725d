// Package client asks kvatlas which inference workers hold how much of a prompt.
//
// A [Client] asks over NATS, on a connection that the program has, or over HTTP:
//
//	c, err := client.NATS(conn, "default", client.Options{})
//	c, err := client.HTTP([]string{"http://127.0.0.1:8090"}, client.Options{})
//
// Both have the same methods and give the same answers and errors:
//
//	answer, err := c.Find(ctx, &client.Query{Model: "llama", Tokens: tokens})
//	list, err := c.Workers(ctx)
//	status, err := c.Status(ctx)
//
// What queries, answers and errors consist of is in pkg/api.
//
// # Deadlines and asking again
//
// The context's deadline travels with each request; without one it is 5 s. Find, Workers, Status and StatusOf change
// nothing, so they are asked again within that time:
//
//   - when the connection is lost or not there yet, after pauses that grow from 20 to 250 ms;
//   - when nobody serves, or who does says that it cannot answer now (503), after the same pauses, for
//     [Options.Absent] or half of the time: then that is the error;
//   - when there is no answer after 250 ms, or a quarter of the time: then another request is sent beside the first
//     (a hedged request), the next after twice as long, and so on. Hedged requests are at most a tenth of all, and a
//     hundred at once after a time without.
//
// The first answer counts. Verify and Snapshot are asked once, and what books: again only if they have reached nobody.
//
// # Errors
//
// Every error but that of a context that was cancelled is, or wraps, an [*Error]; its code says what to do:
//
//	switch client.CodeOf(err) {
//	case api.CodeUnknownModel: // no worker serves it
//	case api.CodeBusy, api.CodeNotReady, api.CodeUnavailable: // ask again a little later
//	}
package client

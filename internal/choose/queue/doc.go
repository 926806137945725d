// Package queue orders the requests waiting for a worker with room.
//
//	q := queue.New(classes)
//	id, err := q.Add(queue.Entry{...}, ranks)        // err: the request may not wait
//	q.Examine(func(id uint64) bool { ... })          // after a change: which requests can go now?
//	q.Remove(id)                                     // the request's deadline has passed
//
// A [Class] has an order of requests: by strict priority, then by score, the greatest first. Deficit round robin
// divides the workers between classes: a turn adds a quantum of tokens to the deficit of a class, and requests of the
// class go until the tokens to compute exceed the deficit. An empty class keeps no deficit.
//
// Examine tries requests in order. Requests with an equal [Entry.Group] may go to the same workers. After a failure,
// the examination skips the rest of the group. The cost of an examination is a try per group, and a try per successful
// request.
//
// A queue has no clock and no goroutine, and is not safe for concurrent use. It does not depend on models or workers:
// internal/choose/selection has a queue for each model.
package queue

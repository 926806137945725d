// Package queue orders the requests that wait for a worker with room.
//
//	q := queue.New(classes)
//	id, err := q.Add(queue.Entry{...}, ranks)        // err: the request may not wait
//	q.Examine(func(id uint64) bool { ... })          // after a change: which requests can go now?
//	q.Remove(id)                                     // the request's deadline has passed
//
// Each [Class] has its own order: by strict priority, then by score, the greatest first. Deficit round robin divides the
// workers between classes: in its turn, a class gets a quantum of tokens, and its requests go until their tokens to
// compute exceed the deficit. An empty class keeps no deficit.
//
// Examine tries requests one by one. Requests with an equal [Entry.Group] may go to the same workers. If one request of
// a group fails, the examination skips the rest of the group. An examination therefore costs one try per group, and one
// per request that goes.
//
// A queue has no clock and no goroutine, and is not safe for concurrent use. It does not depend on models or workers:
// internal/choose/selection has one queue per model.
package queue

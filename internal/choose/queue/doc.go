// Package queue answers: of the requests that wait for a worker with room, which is next?
//
//	q := queue.New(classes)
//	id, err := q.Add(queue.Entry{...}, ranks)        // or why it may not wait
//	q.Examine(func(id uint64) bool { ... })          // something has changed: who can go now?
//	q.Remove(id)                                     // its deadline has passed
//
// Each [Class] has an order of its own: by strict priority, then by score, both the greatest first. Between classes
// there is deficit round robin: a class whose turn it is gets a quantum of tokens, and its requests go while it has as
// many as they are to compute. A class that has nobody waiting keeps nothing.
//
// Who goes is found by trying. Requests with an equal [Entry.Group] may go to the same workers: when one of a group has
// been tried in vain, the others of the group are not tried in the same examination. So an examination costs one try
// for each group, and one for each request that goes.
//
// A queue has no clock and no goroutine; one goroutine at a time may use it. It does not know models or workers:
// internal/choose/selection has one for each model.
package queue

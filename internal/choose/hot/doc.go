// Package hot finds prefixes with more demand than their holders can serve, and plans further copies of them.
//
//	t := hot.New(hot.Config{})
//	t.Chose(now, &hot.Choice{...})      // of every request
//	prefixes := t.Prefixes(now, limit)  // the prefixes with the largest benefit of a copy
//	t.Copied(now, copy)                 // a worker has computed a prefix
//	copies := t.Copies()                // with the use since
//
// A [Tracker] has the state of one model. The Tracker forecasts the first token of a request on the chosen worker, and
// on further workers with a copy of a prefix of the prompt. The difference is the benefit of a copy for the request. A
// Tracker is a state machine for one goroutine at a time. The caller gives the time. DESIGN.md has the reasons.
package hot

// Package selection chooses the worker for a request, and reports the outstanding work of workers. It combines the
// index (held blocks), the registrations (eligible ranks), the load table and pkg/routing, and books the choice:
//
//	s, err := selection.New(selection.Config{Find: server.Find, Pool: registry.Pool, Loads: loads})
//	choice, err := s.Select(ctx, &api.SelectRequest{...}) // booked, if Book is set
//	err = s.PrefillComplete(ctx, &api.RequestRef{...})    // the first output token has arrived
//	err = s.Free(ctx, &api.RequestRef{...})               // the request has ended
//
// Candidates are the registered ranks of the model in any state. The choice drops ineligible ranks, with a reason. A
// candidate without events in the log holds nothing, apart from guesses (internal/choose/guess). A model without
// registrations is unknown.
//
// A request may also belong to a session that stays on its worker (sessions.go, internal/choose/affinity), need a
// decode and a prefill worker (disaggregated.go), and wait while all workers are busy (waiting.go,
// internal/choose/queue). The engines' reports of used memory decide the eligibility (engines.go). A choice may name a
// worker that can send further blocks of the prompt to the chosen one (sources.go).
//
// A prompt's blocks are counted by sequence hashes ([events.SeqHashes] of the local hashes), so blocks of a common
// prefix count once on each worker. Engines that read ahead hash blocks differently; sequence hashes have no lookahead.
//
// A [Service] is safe for concurrent use. Errors are of type [*api.Error].
package selection

// Package selection answers: which worker should serve this request, and what have the workers to do? It joins the
// index (what each worker holds), the registrations (who may be chosen), the load table (who is busy) and pkg/routing
// (which choice follows), and books what was chosen:
//
//	s, err := selection.New(selection.Config{Find: server.Find, Pool: registry.Pool, Loads: loads})
//	choice, err := s.Select(ctx, &api.SelectRequest{...}) // booked, if it says so
//	err = s.PrefillComplete(ctx, &api.RequestRef{...})    // the first output token has come
//	err = s.Free(ctx, &api.RequestRef{...})               // the request has ended
//
// Candidates are the ranks that are registered for the model, in whichever state; the choice drops those that may not
// be chosen, with a reason. A candidate of which no events are in the log holds nothing, but for what it is guessed to
// hold (internal/choose/guess). A model without registrations is not known.
//
// Besides, a request may be of a session that is kept on its worker (sessions.go, internal/choose/affinity), want a
// decode and a prefill worker (disaggregated.go), and wait while all workers are busy (waiting.go,
// internal/choose/queue). What engines report of themselves decides who may be chosen (engines.go).
//
// A prompt's blocks are counted by sequence hashes ([events.SeqHashes] of its local hashes), so that requests with a
// common prefix count its blocks once on each worker. Engines that read ahead hash blocks differently; sequence hashes
// are those without.
//
// A [Service] may be used by any number of goroutines. Errors are of type [*api.Error].
package selection

// Package recording records the requests that nodes route, as keyed hashes, and reads the records.
//
//	keys, err := recording.NewKeys(secret)
//	r := recording.New(recording.Config{Keys: keys, Stream: stream, ...})
//	go r.Run(ctx)
//	r.Request(&recording.Observed{...})     // a request with the choice
//	r.End(id, recording.End{...})           // the end of the request with this id
//	r.Report(id, recording.Report{...})     // the reuse that the engine reports
//	r.Answer(id, recording.Answer{...})     // the tokens of the answer
//
//	e, err := recording.NewExporter(w, recording.Mooncake, 0)
//	summary, err := recording.Read(ctx, source, recording.Filter{Since: since}, e.Write)
//
// # What a record contains
//
// A record has no token and no text. Prompts, sessions, adapters and ids of requests are names: the first 8 bytes of
// AES-128 over a 64-bit or 128-bit hash, under keys from a secret of the namespace ([Keys]). Names of prompts have a
// separate key for each model and block size. The hash of a prompt covers its cache salt, and so does the hash of a
// session. Names of different salts are therefore unrelated, and a reader without the secret can neither link them nor
// confirm a guessed prompt. A holder of the secret can confirm guesses, like a holder of the index.
//
// Models, workers and policies are in clear text: they are names of the operator.
//
// # Spans
//
// A prompt has one name for each [Request.Span] tokens, a multiple of the block size, and a name for the whole blocks
// of the rest. A name stands for the prompt from its first token to the end of the span or of the last whole block.
// Equal names are equal prefixes. Therefore the common prefix of two recorded prompts is exact in whole spans.
//
// # The path of a record
//
//	request ─▶ encode ─▶ open batch ─▶ closed batches ─▶ Run ─▶ JetStream
//
// A caller encodes the record into the open batch and never waits for I/O. Run stores a batch when it has [batchBytes]
// or is a second old. While a batch cannot be stored, closed batches wait, up to [queueBytes]. Further records are
// dropped and counted, and the next batch contains the count.
//
// A request, the end, the report and the answer are separate records with the name of the request's id. [Read] joins
// these records. Therefore the recorder keeps no state of requests, and a restart loses only the records in the queue.
//
// The package is the input of an analysis of other policies or fleets, which replays the records together with the log
// of events. A record therefore has the tiers and the load of the chosen worker before the choice. A holder of the
// secret can compute the names of the log's blocks.
//
// A [Recorder] is safe for concurrent use. [Read] and [Export] use no shared state.
package recording

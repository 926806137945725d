// Package whatif predicts the effect of a change to a fleet on its recorded traffic. It is the command indexer what-if.
//
//	in := NewInput(DefaultLimits(), model)
//	_, err := recording.Read(ctx, source, filter, in.Add)   // or in.ReadFile(r)
//	fleet, err := FleetOf(workers, model)                   // or in.Fleet()
//	report, err := Run(ctx, Options{Input: in, Fleet: fleet, Changes: changes})
//
// # Replays
//
// The workload is the recording, and the simulator is package routesim with the real index and the real policies. The
// first half of the requests fills the caches and fits the constants of the engines. All figures are of the second
// half.
//
//   - history: each request goes to the recorded worker. The difference to the measured figures is the error of the
//     simulated engines.
//   - baseline: the recorded policy chooses among today's workers.
//   - changed: the same with the changes.
//
// The expected hit rate is the measured one plus the difference between changed and baseline. Expected times and
// throughput are the measured ones, multiplied by changed / baseline. So the error that both replays have in common
// cancels out.
//
// # Names of blocks
//
// A recorded name covers a span of several blocks. A prompt that continues the last, partial span of an earlier prompt
// has a new name for this span. The recorded depth of the prompt on the chosen worker determines the number of common
// blocks, and the names of the blocks follow from it (names.go).
//
// # Limits
//
// [Input] keeps the latest requests within [Limits] and counts the others. Every omission is a note of the [Report].
package whatif

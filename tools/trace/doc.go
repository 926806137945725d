// Package trace reads, generates and measures request traces of a fleet of engines.
//
// A trace is a list of requests in order of time. A request has lengths in tokens and an id for every 512 tokens of the
// prompt. Requests with equal leading ids have prompts with equal prefixes. A trace contains no text and can be
// published. The format is the format of kvcache-ai/Mooncake (FAST25-release/traces/*.jsonl, Apache-2.0), with a JSON
// object on every line:
//
//	{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [0, 46, 47, 48, …]}
//
//	timestamp      ms since the start of the trace
//	input_length   tokens of the prompt
//	output_length  tokens of the answer
//	hash_ids       an id for every 512 tokens of the prompt, the last part may be shorter; an id identifies the block and
//	               all blocks before
//	session_id     the conversation of the request; optional, absent in Mooncake's traces
//
// Use [ReadFile] for a published trace, or [Generate] without a file. [Request.PromptTokens] and [Request.OutputTokens]
// return tokens that are equal exactly for equal ids.
//
// # The generator
//
// [Generate] makes a trace with the shape of Mooncake's conversation trace from a seed. In the model, users arrive in
// clumps every three seconds. After an answer the user continues with a probability that grows with the number of
// turns, and after a delay. Most follow-ups repeat the conversation (prompt and answer) and append to the conversation.
// Some follow-ups change an earlier part, as an edited prompt does. All prompts share the first 512 tokens. Lengths and
// times are drawn from the quantiles of the real trace. The generator uses only integers and the raw 64 bits of PCG in
// math/rand/v2, so a seed gives the same trace on every platform and in every version of Go.
//
// [Measure] returns for the real trace and for [Generate] with the zero Options (12,031 requests each):
//
//	                                        real                              generated
//	requests; minutes                       12031; 59                         12031; 60
//	input tokens                            12035: 964 2306 6909 15368        12055: 969 2173 6643 14697
//	                                           27367 85401                       28493 91233
//	output tokens                           343: 24 156 350 472 597 1120      341: 23 151 347 473 598 1178
//	blocks; distinct; share reused          288500; 182790; 0.366             289001; 170321; 0.411
//	follow-ups; of these extend the whole   0.387; 0.850                      0.391; 0.856
//	blocks shared by a follow-up            21: 2 5 12 26 49 150              24: 2 5 13 28 55 173
//	turns; share with one; most             1.63; 0.69; 43                    1.64; 0.70; 17
//	s until the follow-up                   215: 42 66 123 264 483 1482       194: 36 63 114 240 432 1257
//	requests in 3 s                         10: 0 5 10 15 21 29               10: 0 5 9 14 20 28
//
// Lists are the mean, then the percentiles 10, 25, 50, 75, 90 and 99.
//
// The traces differ at the start: the real trace is an excerpt of a running service, so some of the first requests
// follow earlier requests outside the trace. A generated trace begins with an idle fleet.
//
// All types are values. The package needs no locks and shares nothing between goroutines.
//
// Package tools/corpus generates the events of a fleet of engines serving a trace.
package trace

// Package trace answers: what did users ask of a fleet of engines, when, and how much of it was the same?
//
// A trace is a list of requests in order of time. A request has lengths in tokens and, for each 512 tokens of its
// prompt, an id; two requests whose ids begin alike have prompts that begin alike. Nothing is known of the text, which
// is why such traces can be published. The format is that of kvcache-ai/Mooncake (FAST25-release/traces/*.jsonl,
// Apache-2.0), one JSON object a line:
//
//	{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [0, 46, 47, 48, …]}
//
//	timestamp      ms since the trace's beginning
//	input_length   tokens of the prompt
//	output_length  tokens of the answer
//	hash_ids       one id for each 512 tokens of the prompt, the last perhaps not full; an id stands for its block and all
//	               that comes before it
//	session_id     the conversation of the request; optional, and not in Mooncake's traces
//
// Use [ReadFile] for a published trace, or [Generate] where none is at hand; [Request.PromptTokens] and
// [Request.OutputTokens] make tokens that are equal exactly where the trace says so.
//
// # The generator
//
// [Generate] makes a trace with the shape of Mooncake's conversation trace, from a seed. The model: users arrive in
// clumps every three seconds. After each answer the user goes on with some probability, which grows with the turns so
// far, and after some time. Most follow-ups repeat the conversation (prompt and answer) and add to it; some take up an
// earlier part of it and go another way, as an edited prompt does. All prompts share their first 512 tokens. Lengths
// and times are drawn from the quantiles of the real trace; only whole numbers are used, and of math/rand/v2 only the
// raw 64 bits of PCG, so that a seed gives the same trace on every platform and in every version of Go.
//
// What [Measure] says of the real trace and of [Generate] with the zero Options (12,031 requests each):
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
// Lists are the mean, then the 10th, 25th, 50th, 75th, 90th and 99th of a hundred.
//
// One deviation is worth knowing: the real trace was cut out of a running service, so that some of its first requests
// follow what is not in it, while a generated one begins with an idle fleet.
//
// Everything here is a value or works on one; nothing needs a lock, and nothing is shared between goroutines.
//
// What a fleet of engines would announce while serving a trace is made by tools/corpus.
package trace

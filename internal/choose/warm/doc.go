// Package warm computes prefixes on workers for later requests: the package keeps the tokens of hot prefixes in
// bounded memory, and sends completions of one token to engines.
//
//	prompts := warm.NewPrompts(64 << 20)
//	prompts.Offer(hash, &warm.Prompt{Tokens: tokens}, savedMS)
//	engines := warm.NewEngines(rule)
//	err := engines.Complete(ctx, endpoint, model, rank, &prompt)
//
// Only the engine receives tokens from this process: no log, no file and no node.
package warm

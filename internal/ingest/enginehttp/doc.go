// Package enginehttp answers one question: what does an engine say over HTTP of how it publishes its KV-cache events?
//
// [Ask] finds out which engine answers and reads what a shim needs: the model's name, the size of a block, and for each
// data-parallel rank where its events and its replay socket are. It also reads what a choice of worker needs: the room
// of device memory in blocks, and how many tokens a step computes. A host that stands for all of the engine's
// interfaces becomes the host of the URL.
//
//	vLLM 0.32 and later   GET /kv_event_sources (endpoints, by rank), /v1/models (the name),
//	                      /metrics (vllm:cache_config_info: block size and number of blocks),
//	                      /server_info?config_format=json (max_num_batched_tokens; in its development mode only)
//	vLLM before           /version and the same without /kv_event_sources: all but where it publishes
//	SGLang                GET /server_info (kv_events_config, page_size, dp_size, served_model_name, max_total_num_tokens,
//	                      max_prefill_tokens, enable_lora, lora_paths; since 0.5.18 the descriptor kv_events too), and of
//	                      a shared store /get_hicache_l3_cache_layout (since 0.5.23)
//
// Errors say what the caller does next: [ErrNotReady] is worth another attempt, [ErrUnknown] and [ErrNoEvents] are not
// until somebody changes something. What an engine leaves open is left open in the [Engine], for the caller's own
// settings to fill.
//
// An [Asker] may be used from any goroutine.
package enginehttp

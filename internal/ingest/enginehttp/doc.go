// Package enginehttp reads an engine's KV-cache event settings over HTTP.
//
// [Ask] detects the kind of engine and reads the settings for a shim: the model's name, the block size, and the event
// endpoint and replay endpoint of each data-parallel rank. It also reads the values for choosing a worker: the device
// memory in blocks, and the tokens computed in a step. If an endpoint's host means all interfaces, the URL's host
// replaces it. [Asker.Loads] reads the present load of a running engine.
//
//	vLLM 0.32 and later   GET /kv_event_sources (endpoints, by rank), /v1/models (the name),
//	                      /metrics (vllm:cache_config_info: block size and number of blocks),
//	                      /server_info?config_format=json (max_num_batched_tokens; in its development mode only)
//	vLLM before           /version and the same without /kv_event_sources: everything except the endpoints
//	SGLang                GET /server_info (kv_events_config, page_size, dp_size, served_model_name, max_total_num_tokens,
//	                      max_prefill_tokens, enable_lora, lora_paths, disaggregation_mode; since 0.5.18 the descriptor
//	                      kv_events too), and of a shared store /get_hicache_l3_cache_layout (since 0.5.23)
//
// Errors are classified by the caller's reaction. [ErrNotReady] is worth another attempt. [ErrUnknown] and
// [ErrNoEvents] require a change of configuration. Fields of [Engine] stay empty if the engine does not report them;
// the caller's settings replace empty fields.
//
// An [Asker] is safe for concurrent use.
package enginehttp

package fields

import "strings"

// API is an HTTP API of engines.
type API string

// The APIs. An empty API is unknown.
const (
	Completions API = "completions"
	Chat        API = "chat"
	Responses   API = "responses"
	Messages    API = "messages"
	Embeddings  API = "embeddings"
	Score       API = "score"
	Rerank      API = "rerank"
)

// APIs lists all APIs.
var APIs = []API{Completions, Chat, Responses, Messages, Embeddings, Score, Rerank}

// paths are the ends of the APIs' paths.
var paths = []struct {
	end string
	api API
}{
	{"/chat/completions", Chat}, {"/completions", Completions}, {"/responses", Responses}, {"/v1/messages", Messages},
	{"/embeddings", Embeddings}, {"/score", Score}, {"/rerank", Rerank},
}

// OfPath returns the API of a request's path, which may have a prefix and a query. It is empty for another path.
func OfPath(path string) API {
	path, _, _ = strings.Cut(path, "?")
	path = strings.TrimRight(path, "/")
	for _, p := range paths {
		if strings.HasSuffix(path, p.end) {
			return p.api
		}
	}
	return ""
}

// Agents reports whether an API is an API of agents. All fields of its class Tokens are in Text.Request.
func (a API) Agents() bool { return a == Responses || a == Messages }

// Generates reports whether workers generate text for requests of an API, in steps of prefill and decode.
func (a API) Generates() bool { return a == Completions || a == Chat || a.Agents() }

// Class is the effect of a field on a choice. The zero value is that of an unknown field.
type Class int

// The classes. The doc comment of the package describes them.
const (
	Tokens Class = iota + 1
	Identity
	Unsupported
	Irrelevant
	Ignored
)

// Table has the class of each field of an API.
type Table map[string]Class

// TableOf returns the table of an API; nil for an API without one. The table must not be modified.
func TableOf(a API) Table { return tables[a] }

// Known reports whether a table has a field.
func Known(name string) bool {
	for _, t := range tables {
		if t[name] != 0 {
			return true
		}
	}
	return false
}

// newTable returns a table. Each argument has the names of a class, separated by white space.
func newTable(tokens, identity, unsupported, irrelevant, ignored string) Table {
	t := Table{}
	for i, names := range []string{tokens, identity, unsupported, irrelevant, ignored} {
		for _, name := range strings.Fields(names) {
			t[name] = Tokens + Class(i)
		}
	}
	return t
}

var tables = map[API]Table{
	Completions: newTable(
		`prompt add_special_tokens suffix truncate_prompt_tokens truncation_side`,
		identityFields,
		generationUnsupported+` prompt_embeds mm_processor_kwargs`,
		generation+` logprobs best_of custom_labels`,
		openAI),
	Chat: newTable(
		`messages tools tool_choice chat_template chat_template_kwargs add_generation_prompt continue_final_message
		add_special_tokens truncate_prompt_tokens truncation_side reasoning_effort documents response_format
		media_io_kwargs mm_processor_kwargs`,
		identityFields,
		// kv_transfer_params may contain the prompt's tokens. SGLang reads reasoning, which is no field of its model.
		generationUnsupported+` kv_transfer_params reasoning input_ids thinking task max_dynamic_patch min_dynamic_patch
		use_audio_in_video video_config functions function_call`,
		without(generation, `kv_transfer_params response_format`)+`
		logprobs top_logprobs max_completion_tokens parallel_tool_calls include_reasoning separate_reasoning
		stream_reasoning return_prompt_text return_prompt_token_ids return_meta_info return_input_ids_in_sglext
		return_output_ids_in_sglext return_sampling_mask sampling_logprobs_mode return_flat_raw_output_top_logprobs
		return_flat_raw_top_logprobs_b64`,
		openAI+` modalities audio prediction web_search_options`),
	Responses: newTable(
		`input instructions tools tool_choice chat_template_kwargs reasoning truncation max_output_tokens media_io_kwargs
		mm_processor_kwargs`,
		identityFields,
		// kv_transfer_params may contain the prompt's tokens. Only the engine has previous responses.
		`previous_response_id previous_input_messages prompt kv_transfer_params extra_key`,
		`model background include max_tool_calls metadata logit_bias parallel_tool_calls include_reasoning service_tier
		store stream temperature text top_logprobs top_p top_k min_p user skip_special_tokens
		spaces_between_special_tokens include_stop_str_in_output presence_penalty frequency_penalty prompt_cache_key
		prompt_cache_options prompt_cache_retention safety_identifier watermarking request_id session_id priority
		mm_payload return_mm_kwargs enable_response_messages structured_outputs repetition_penalty seed stop
		stop_token_ids ignore_eos vllm_xargs ec_transfer_params data_parallel_rank rid bootstrap_host bootstrap_port
		bootstrap_room routed_dp_rank disagg_prefill_dp_rank`,
		`stream_options verbosity moderation client_metadata conversation context_management`),
	Messages: newTable(
		`messages system tools tool_choice thinking output_config chat_template_kwargs max_tokens`,
		identityFields,
		`kv_transfer_params`,
		`model betas metadata stop_sequences stream temperature top_k top_p mm_payload return_mm_kwargs watermarking
		ec_transfer_params vllm_xargs data_parallel_rank rid bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
		disagg_prefill_dp_rank`,
		`service_tier context_management container mcp_servers inference_geo speed cache_control fallbacks
		user_profile_id`),
	Embeddings: newTable(
		`input`, // token ids only
		identityFields,
		poolingUnsupported+` messages add_generation_prompt continue_final_message chat_template chat_template_kwargs
		media_io_kwargs embed_override_token_id embed_overrides`,
		pooling+` encoding_format embed_dtype endianness dimensions add_special_tokens rid`,
		``),
	Score: newTable(``, identityFields,
		scoringUnsupported+` queries documents items data_1 data_2 text_1 text_2 query embed_override_token_id
		query_embed_overrides item_embed_overrides item_first score_extraction_token`,
		pooling+` label_token_ids apply_softmax temperature return_token_logprobs return_pooled_hidden_states`,
		``),
	Rerank: newTable(``, identityFields,
		scoringUnsupported+` query documents instruct`,
		pooling+` top_n return_documents`,
		``),
}

// Fields of several APIs.
const (
	identityFields = `cache_salt lora_path lora_request`

	// vLLM does not read its cache for a request with prompt_logprobs (SamplingParams.skip_reading_prefix_cache).
	// SGLang adds session_params to the prompt of an earlier request.
	generationUnsupported = `extra_key prompt_logprobs session_params images_config`

	generation = `model echo frequency_penalty logit_bias max_tokens n presence_penalty seed stop stream stream_options
		temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
		include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
		allowed_token_ids logprob_token_ids bad_words response_format structured_outputs priority request_id session_id
		return_tokens_as_token_ids return_token_ids return_weight_versions routed_experts_prompt_start
		return_token_offsets mm_payload return_mm_kwargs kv_transfer_params ec_transfer_params vllm_xargs
		repetition_detection thinking_token_budget stream_interval
		return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
		return_spec_tokens_details json_schema regex ebnf stop_regex no_stop_trim custom_params custom_logit_processor
		watermark data_parallel_rank rid bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
		disagg_prefill_dp_rank`

	openAI = `metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention verbosity moderation
		early_stopping top_p_min prompt_ignore_length detokenize disaggregated_params return_context_logits
		return_generation_logits`

	pooling = `model user request_id priority use_activation`

	poolingUnsupported = `extra_key truncate_prompt_tokens truncation_side padding mm_processor_kwargs`
	scoringUnsupported = poolingUnsupported + ` max_tokens_per_query max_tokens_per_doc instruction chat_template_kwargs`
)

// without returns a list of names without others.
func without(names, others string) string {
	drop := map[string]bool{}
	for _, name := range strings.Fields(others) {
		drop[name] = true
	}
	kept := []string{}
	for _, name := range strings.Fields(names) {
		if !drop[name] {
			kept = append(kept, name)
		}
	}
	return strings.Join(kept, " ")
}

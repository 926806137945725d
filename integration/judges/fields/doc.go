// Package fields compares the tables of internal/text/fields with the request models in the newest pinned wheels of
// vLLM and SGLang. Build tag judges; see `make judges`.
package fields

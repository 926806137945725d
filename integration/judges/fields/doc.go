// Package fields compares the tables of internal/text/fields with the request models in the newest pinned wheels of
// vLLM and SGLang. It also finds the metrics and fields of an engine's load in the wheels that
// internal/ingest/enginehttp reads. Build tag judges; see `make judges`.
package fields

// Package replay compares tools/routesim with NVIDIA Dynamo's own offline simulator (wheel ai-dynamo-runtime,
// run_mocker_trace_replay) on a request trace. The arms must have the same order and the same reuse. Build tag judges;
// see `make judges`.
//
//	go test -tags judges ./integration/judges/replay -v -replay.trace conversation_trace.jsonl
//
// replays a published trace in place of the generated trace, at more points, and prints both sides as a table.
package replay

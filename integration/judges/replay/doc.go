// Package replay holds tools/routesim to NVIDIA Dynamo's own offline simulator (wheel ai-dynamo-runtime,
// run_mocker_trace_replay) on one request trace: the ways to choose workers come in the same order, with the same
// reuse. Build tag judges; see `make judges`.
//
//	go test -tags judges ./integration/judges/replay -v -replay.trace conversation_trace.jsonl
//
// replays a published trace in place of the generated one, at more points, and prints both sides as a table.
package replay

// Package selection puts NVIDIA Dynamo's selection service and slot tracker beside ours: the same random histories go
// to both. Statuses, bodies, loads and overlaps must be equal, and the chosen worker among the cheapest. What differs
// on purpose is in docs/compatibility.md. Build tag judges; see `make judges`.
package selection

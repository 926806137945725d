// Package selection compares NVIDIA Dynamo's selection service and slot tracker with kvatlas: the same random histories
// go to both. Statuses, bodies, loads and overlaps must be equal, and the chosen worker must be among the cheapest.
// internal/faces/compat/DIFFERENCES.md lists the intended differences. Build tag judges; see `make judges`.
package selection

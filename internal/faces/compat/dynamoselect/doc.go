// Package dynamoselect serves the HTTP APIs of NVIDIA Dynamo's standalone selection service and slot tracker (1.6.1).
// Clients change only the address. [Selection] implements the selection service with internal/choose/selection.
// [Tracker] implements the slot tracker, which only counts requests of registered workers. The paths of the two
// services collide, so they need separate listeners.
//
// The bucket of workers stores every posted worker as an operator's record (registry.Operator.Posted). All nodes read
// the records, and a restart of the node keeps them. Shims in this process follow the events of every rank. The
// registry has a worker of the selection service under the worker's number, and the model of a routing group other than
// default as MODEL:GROUP. Workers with another registration are listed and selected too. The registry has a worker of
// the slot tracker as slot-tracker:MODEL:GROUP:NUMBER of the model slot-tracker:MODEL:GROUP. No other name has this
// prefix.
//
// Statuses, fields and most error texts are equal to Dynamo's. ../DIFFERENCES.md lists the intended differences.
// All functions are safe for concurrent use.
package dynamoselect

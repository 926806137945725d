// Package dynamoselect lets clients of NVIDIA Dynamo's standalone selection service and slot tracker (1.6.1) talk to
// kvatlas by changing only the address. [Selection] is the one, over internal/choose/selection; [Tracker] the other,
// which only counts requests for workers that it is told of. Each wants a listener of its own: their paths collide.
//
// Workers that are posted here are kept as operators' records in the bucket of workers (registry.Operator.Posted), so
// that every node knows them and they outlive it. Shims in this process follow the events of each of their ranks. A
// worker of the selection service is declared to the registry under its number, a model of a routing group other than
// default as MODEL:GROUP. Workers that were registered otherwise are listed and chosen too. A worker of the slot
// tracker is declared as slot-tracker:MODEL:GROUP:NUMBER, of the model slot-tracker:MODEL:GROUP: nothing else has such
// names.
//
// Statuses, fields and most words of errors are Dynamo's. docs/compatibility.md lists what differs on purpose. All may
// be used from any goroutine.
package dynamoselect

// Package msgp reads and appends MessagePack without reflection, and without allocations except for the output.
//
// It is for the formats of every event and query: engines' messages, batches of the log, queries and answers. All other
// formats use vmihailenco/msgpack, which is also the twin in the tests here. The package is a leaf. It is internal, so
// that pkg/events can use it without a larger public API.
package msgp

// Package msgp reads and appends MessagePack by hand: no reflection, and no allocation but for what is appended to.
//
// It is under the forms that are read and written for each event and query: engines' messages, batches of the log,
// queries and answers. Everything else goes through vmihailenco/msgpack, which is also the twin in the tests here.
// The package is a leaf. It is internal, so that pkg/events can use it without making it a part of the public surface.
package msgp

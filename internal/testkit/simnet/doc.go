// Package simnet simulates a network of state machines in virtual time. Messages are lost, late, duplicated and
// reordered by a seeded random source, and nodes are cut off and restarted.
//
// A test embeds [Node] in its type of nodes and [Network] in its type of worlds. A node's own Step or Receive may
// observe the state machine before and after a call.
package simnet

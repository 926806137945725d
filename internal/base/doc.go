// Package base holds small helpers that every layer may import, pkg included. Its packages import nothing of ours.
//
//   - datafolder rejects a data folder that other users of the host can change
//   - dial limits which addresses a client may name, and which of them may receive a secret
//   - escape escapes foreign texts for terminals and shell commands
//   - hooks fills in the callbacks that a caller left out
//   - littleendian converts lists of numbers to bytes and back
//   - loop waits, with cancellation, and wakes a waiting goroutine
//   - msgp reads and appends MessagePack without reflection, for events, batches, queries and answers
//   - strictjson decodes JSON with exact letter case and without duplicate names
package base

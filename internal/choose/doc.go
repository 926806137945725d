// Package choose chooses a worker for a request and books it.
//
//   - affinity binds sessions to workers
//   - guess predicts blocks that a worker probably holds, because requests with them were sent there
//   - hot finds prefixes with more demand than their holders can serve, and plans further copies
//   - load keeps the requests under way and the outstanding work of each worker
//   - prompts is the trie of prompts in which guess and load keep the blocks of each worker
//   - queue orders the requests that wait for a worker
//   - removal ranks workers by the reuse lost with a removal
//   - selection joins index, registrations and loads, applies a policy of pkg/routing, and books
//   - warm computes prefixes on workers for later requests
package choose

// Package api has the queries, answers and errors of clients and indexer nodes, with their JSON and MessagePack forms.
// It is independent of transports: internal/serve/server serves it over NATS and HTTP.
//
// A query has a model and either the tokens of a prompt or the local hashes of its blocks:
//
//	{"model":"m","tokens":[1,2,3,…]}
//	{"model":"m","hashes":[13226331709069118873,…]}
//
// The answer has, for each (worker, rank) with at least one leading block, the number of held blocks of the prefix:
//
//	{"model":"m","block_size":16,"blocks":767,"complete":true,
//	 "workers":[{"instance":"w1","rank":0,"device":12,"host":3,"disk":0,"external":0,"l3":700,"l3_stop":"not_in_store"}],
//	 "partitions":[{"partition":0,"epoch":"2026-11-21T08:00:00Z","seq":123}],
//	 "l3":{"status":"ok","ranges":[[0,715]],"total":715,"age_ms":3.1,"from_start":715}}
//
// Depths are in blocks: device counts the leading blocks in device memory, host the blocks directly after them in host
// memory, then disk, then external. Workers are sorted, best first. "partitions" has the least position of each
// partition's log that the answer reflects. "reason" is set in an answer without workers. "l3" of a worker is the
// number of further blocks that its engine would load from the shared store. Workers without blocks that would load
// some are listed too. "l3" of the answer has the contents of the store, or the reason that they are unknown. With
// "explain": true, workers have a "path": the held blocks with their tiers, and the rule that ended the prefix.
//
// A client's request is read strictly. The error names unknown fields, fields in another letter case, repeated fields,
// text that is not UTF-8, and empty lists in place of omitted lists. 64-bit numbers may be text in decimal digits.
// Requests between nodes may have fields that the receiver ignores ([Handler.IgnoreUnknown]).
//
// A failure is an error, never an empty answer:
//
//	{"error":{"code":"unknown_model","message":"no worker has announced model \"x\"; known: m"}}
package api

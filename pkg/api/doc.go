// Package api is what clients and indexer nodes say to each other: queries and answers, their JSON and MessagePack
// forms, and the errors with their codes. It knows no transport: internal/serve/server serves it over NATS and HTTP.
//
// A query names a model and either the tokens of a prompt or the local hashes of its blocks:
//
//	{"model":"m","tokens":[1,2,3,…]}
//	{"model":"m","hashes":[13226331709069118873,…]}
//
// The answer says, for each (worker, rank) that holds at least one leading block, how many blocks it holds of the
// prefix:
//
//	{"model":"m","block_size":16,"blocks":767,"complete":true,
//	 "workers":[{"instance":"w1","rank":0,"device":12,"host":3,"disk":0,"external":0,"l3":700,"l3_stop":"not_in_store"}],
//	 "partitions":[{"partition":0,"epoch":"2026-11-21T08:00:00Z","seq":123}],
//	 "l3":{"status":"ok","ranges":[[0,715]],"total":715,"age_ms":3.1,"from_start":715}}
//
// Depths are in blocks: device counts the leading blocks held in device memory, host how many more follow directly in
// host memory, disk those that follow these, external those that follow these. Workers come best first. "partitions"
// says which place in each partition's log the answer reflects at least. An answer without workers says why in
// "reason". "l3" of a worker is how many blocks more it would load from the shared store, by its engine's rules;
// workers that hold nothing and would load something are listed too. The answer's "l3" says what lies in the store, and
// if nothing is known of it, why. With "explain": true workers have a "path": which blocks they hold in which tiers,
// and which rule ended their prefix.
//
// A client's request is taken for what it says or refused by name: fields that are not known, in another letter case or
// given twice, text that is not UTF-8, an empty list where that would mean all. 64-bit numbers may come as text in
// decimal digits. What nodes ask each other may have fields that the one that is asked does not know ([IgnoreUnknown]).
//
// Anything that cannot be answered is an error, never an empty answer:
//
//	{"error":{"code":"unknown_model","message":"no worker has announced model \"x\"; known: m"}}
package api

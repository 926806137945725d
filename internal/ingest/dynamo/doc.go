// Package dynamo communicates with NVIDIA Dynamo's workers in place of Dynamo's router: it finds the sockets for their
// events, and reads missed events again.
//
//	list, wrong, err := dynamo.Publishers("/tmp/dynamo_store_kv", time.Now())  // from the folder of file discovery
//	list, wrong, err := etcd.Publishers()                                       // from etcd; see [Etcd]
//	data, err := dynamo.Envelope(frames)                                        // from a message of a ZeroMQ socket
//	answer, err := dynamo.Ask(ctx, rule, list[0].Indexer, list[0].Key, 17)       // the events since 17, or all blocks
//
// The formats are those of ai-dynamo 1.6.1, as its own processes write them; `make judges` compares.
//
// # Discovery
//
// DYN_DISCOVERY_BACKEND=file keeps a JSON file for each record below DYN_FILE_KV. The process of a record touches its
// file every few seconds. DYN_DISCOVERY_BACKEND=etcd, the default, stores the same records as keys of etcd, under the
// lease of the process. v1/event_channels contains the ZeroMQ endpoint of each publisher. v1/event_sources contains,
// under the same publisher_id, the publisher's worker and rank, and the address of their local indexer. v1/mdc contains
// the model deployment cards of the workers, with their roles.
//
// # A message of the event plane
//
//	topic "kv-events" │ publisher_id, u64 │ sequence, u64 │ 1, length u32, MessagePack EventEnvelope
//
// # The request plane
//
// A request is sent to HOST:PORT of "HOST:PORT/PATH". The worker sends the answer over a new connection to the client.
// Numbers are big-endian.
//
//	to the worker    length u16, PATH │ length u16, headers (JSON) │ length u32, message
//	it acknowledges  length u32, "" or the reason for a refusal
//	it calls back    message {"subject","stream_type"} │ message {"error"} │ messages with the answer │ message "sentinel"
//	a message        length of head u64 │ length of body u64 │ checksum u64, 0 for none │ head (JSON) │ body (MessagePack)
//
// The head of a request contains the address for the new connection, and a secret subject.
package dynamo

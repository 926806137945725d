// Package dynamo speaks with NVIDIA Dynamo's workers in place of its router: where do they publish their events, and
// which did we miss?
//
//	list, wrong, err := dynamo.Publishers("/tmp/dynamo_store_kv", time.Now())  // from the folder of file discovery
//	list, wrong, err := etcd.Publishers()                                       // from etcd; see [Etcd]
//	data, err := dynamo.Envelope(frames)                                        // of a message of their ZeroMQ sockets
//	answer, err := dynamo.Ask(ctx, rule, list[0].Indexer, list[0].Key, 17)           // events from 17 on, or all that is held
//
// The forms are those of ai-dynamo 1.6.1, as its own processes write them; `make judges` compares.
//
// # Discovery
//
// DYN_DISCOVERY_BACKEND=file keeps a JSON file for each record below DYN_FILE_KV, which its process touches every few
// seconds. DYN_DISCOVERY_BACKEND=etcd, the default, has the same records as keys of etcd, under the lease of their
// process. v1/event_channels has the ZeroMQ endpoint of each publisher, v1/event_sources, under the same publisher_id,
// the worker and rank that it publishes for, and where their local indexer is asked.
//
// # A message of the event plane
//
//	topic "kv-events" │ publisher_id, u64 │ sequence, u64 │ 1, length u32, MessagePack EventEnvelope
//
// # The request plane
//
// A request goes to HOST:PORT of "HOST:PORT/PATH", and the answer comes over a connection that the worker makes to who
// asks. Numbers are big-endian.
//
//	to the worker    length u16, PATH │ length u16, headers (JSON) │ length u32, message
//	it acknowledges  length u32, "" or why it refuses
//	it calls back    message {"subject","stream_type"} │ message {"error"} │ messages with the answer │ message "sentinel"
//	a message        length of head u64 │ length of body u64 │ checksum u64, 0 for none │ head (JSON) │ body (MessagePack)
//
// The head of a request names the address to call back, and a subject that nobody else can know.
package dynamo

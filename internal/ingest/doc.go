// Package ingest turns the announcements of engines into batches in the log, and discovers the engines.
//
//   - control sends requests to running shims over NATS
//   - dynamo discovers the workers of NVIDIA Dynamo in files, etcd and Kubernetes, and reads Dynamo's request plane
//   - enginehttp reads the settings of an engine's events over HTTP
//   - etcd keeps a copy of a key range of etcd by list and watch
//   - kube keeps copies of Kubernetes objects by list and watch, and shares the objects among replicas by Leases
//   - pods shims the engines in the pods of a Kubernetes cluster
//   - sharedstore queries the objects of Mooncake masters and folders, and mirrors a master's events
//   - shim turns one engine's stream into batches: a state machine and the loop around it, and host, which runs one
//     rank from its claim to its end, and all ranks of an engine
//   - source shims the ranks of sources with many workers, for example Dynamo's event planes
//   - zmtp implements ZeroMQ's SUB and DEALER sockets without cgo
package ingest

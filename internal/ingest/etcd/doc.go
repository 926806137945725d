// Package etcd keeps a copy of a range of etcd's keys.
//
// A [Copy] lists the range and watches it. Dynamo's workers register in etcd (internal/ingest/dynamo), and Mooncake's
// masters write the name of their leader there (internal/index/node). etcd deletes a key when the lease of its writer
// ends. While etcd is unreachable, [Copy.Records] returns the reason instead of an old copy.
package etcd

// Package etcd answers one question: which keys of a range does etcd have now?
//
// A [Copy] lists the range and watches it: Dynamo's workers register there (internal/ingest/dynamo), and Mooncake's
// masters write down who leads (internal/index/node). Keys under a lease of their writer disappear with it. If etcd
// cannot be asked, [Copy.Records] returns the reason instead of an old copy.
package etcd

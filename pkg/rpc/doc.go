// Package rpc holds the requests of one process that wait for a reply over NATS, and bounds those that it sends twice.
//
// A [Pool] sends requests on one connection and gives each reply to whoever sent the request:
//
//	pool, err := rpc.NewPool(conn)
//	id, err := pool.Send("kv.v1.default.q.find", api.MsgPack, time.Second, "", body, receiver, 0)
//
// One subscription takes all replies, so a request costs nothing but its message. pkg/client asks through a pool, and
// the nodes of a cluster ask each other through one; both take their hedged requests from its [Budget].
//
// All methods may be called from any goroutine. A [Receiver] is called from the subscription's goroutine while the pool
// is locked: it must return soon and must not call the pool.
//
// What is asked, and when it is asked again, is left to others: pkg/client and internal/index/scatter.
package rpc

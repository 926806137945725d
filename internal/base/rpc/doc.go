// Package rpc sends requests over NATS, matches replies to requests, and bounds hedged requests.
//
// A [Pool] sends requests on a connection and passes the reply of a request to a receiver:
//
//	pool, err := rpc.NewPool(conn)
//	id, err := pool.Send("kv.v1.default.q.find", api.MsgPack, time.Second, "", body, receiver, 0)
//
// A single subscription receives all replies, so a request costs only the message. pkg/client and the nodes of a
// cluster send requests through a pool. The [Budget] of the pool bounds hedged requests.
//
// All methods are safe for concurrent use. The goroutine of the subscription calls a [Receiver] while the pool is
// locked. A receiver must return soon and must not call the pool.
//
// The callers, pkg/client and internal/index/scatter, choose the requests and the times of retries.
package rpc

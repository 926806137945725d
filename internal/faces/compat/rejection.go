package compat

import "github.com/kvatlas/kvatlas/pkg/api"

// QueueRejection is the reason that the queue rejected a request, in Dynamo's form (QueueRejection in
// scheduling/policy_queue.rs of dynamo-kv-router 1.6.1).
type QueueRejection struct {
	Class   string `json:"policy_class"`
	Kind    string `json:"limit_kind"` // requests, raw_isl_tokens or cached_tokens
	Current uint64 `json:"current"`    // what waits
	Limit   uint64 `json:"limit"`
}

// NewQueueRejection converts the error of a full queue. The result is nil for any other error and for a request with an
// expired deadline.
func NewQueueRejection(err error) *QueueRejection {
	kinds := map[string]string{"full": "requests", "requests": "requests", "raw_tokens": "raw_isl_tokens",
		"cached_tokens": "cached_tokens"}
	q := api.AsError(err).Queue
	if q == nil || kinds[q.Reason] == "" {
		return nil
	}
	return &QueueRejection{Class: q.Class, Kind: kinds[q.Reason], Current: uint64(q.Current), Limit: uint64(q.Limit)}
}

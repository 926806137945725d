package compat

import "github.com/kvatlas/kvatlas/pkg/api"

// QueueRejection is why a request does not wait for a worker that is not busy, as Dynamo has it (QueueRejection in
// scheduling/policy_queue.rs of dynamo-kv-router 1.6.1).
type QueueRejection struct {
	Class   string `json:"policy_class"`
	Kind    string `json:"limit_kind"` // requests, raw_isl_tokens or cached_tokens
	Current uint64 `json:"current"`    // what waits
	Limit   uint64 `json:"limit"`
}

// NewQueueRejection is the rejection that an error stands for; nil if it is another error, or the deadline has passed
// while the request waited.
func NewQueueRejection(err error) *QueueRejection {
	kinds := map[string]string{"full": "requests", "requests": "requests", "raw_tokens": "raw_isl_tokens",
		"cached_tokens": "cached_tokens"}
	q := api.AsError(err).Queue
	if q == nil || kinds[q.Reason] == "" {
		return nil
	}
	return &QueueRejection{Class: q.Class, Kind: kinds[q.Reason], Current: uint64(q.Current), Limit: uint64(q.Limit)}
}

package scatter

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Union merges the answers of several nodes to a query. Workers of a partition never depend on another partition, so
// the union is exact.
type Union struct {
	query       *api.Query // as sent to nodes, with hashes
	partitionOf func(events.WorkerID) (events.Partition, error)

	answer   *api.Answer
	sizes    []uint32   // block sizes of the answers
	allowed  bool       // an allowed worker serves the model
	mismatch *api.Error // the verdict of a node with another block size of the model
}

// NewUnion returns an empty union. partitionOf returns the partition of a worker.
func NewUnion(q *api.Query, partitionOf func(events.WorkerID) (events.Partition, error)) *Union {
	return &Union{query: q, partitionOf: partitionOf, answer: &api.Answer{
		Model: q.Model, Workers: []api.Overlap{}, Partitions: []api.PartitionStatus{},
	}}
}

// Verdict reports whether an error is a node's result about the partitions instead of a failure.
func Verdict(err *api.Error) bool {
	return err.Code == api.CodeUnknownModel || err.Code == api.CodeBlockSizeMismatch
}

// Add adds the given partitions, in ascending order, from a node's answer or verdict.
func (u *Union) Add(taken []events.Partition, a *api.Answer, verdict *api.Error) {
	if verdict != nil {
		if verdict.Code == api.CodeBlockSizeMismatch {
			u.mismatch = verdict
		}
		return
	}
	if !slices.Contains(u.sizes, a.BlockSize) {
		u.sizes = append(u.sizes, a.BlockSize)
	}
	for _, l := range a.Lookaheads {
		if at, has := slices.BinarySearch(u.answer.Lookaheads, l); !has {
			u.answer.Lookaheads = slices.Insert(u.answer.Lookaheads, at, l)
		}
	}
	u.allowed = u.allowed || a.Reason != api.ReasonNotAllowed
	has := func(p events.Partition) bool { _, found := slices.BinarySearch(taken, p); return found }
	u.answer.Workers = slices.Grow(u.answer.Workers, len(a.Workers))
	for i := range a.Workers {
		if p, err := u.partitionOf(a.Workers[i].Instance); err == nil && has(p) {
			u.answer.Workers = append(u.answer.Workers, a.Workers[i])
		}
	}
	for _, p := range a.Partitions {
		if has(p.Partition) {
			u.answer.Partitions = append(u.answer.Partitions, p)
		}
	}
}

// Answer returns the merged answer, without the missing partitions. The caller must finish the answer; the reason is
// valid if no worker holds a block. Errors equal the errors of a node with all data. [api.CodeNotReady] means that all
// workers of the model may be in missing partitions.
func (u *Union) Answer(missing []events.Partition) (*api.Answer, error) {
	switch {
	case len(u.sizes) > 1:
		slices.Sort(u.sizes)
		return nil, api.Errorf(api.CodeBlockSizeMismatch,
			"workers serve %q with different block sizes: %s; the query must name a size",
			u.query.Model, strings.Trim(strings.Join(strings.Fields(fmt.Sprint(u.sizes)), ", "), "[]"))
	case u.mismatch != nil && u.query.BlockSize == 0, u.mismatch != nil && len(u.sizes) == 0 && len(missing) == 0:
		return nil, api.Errorf(u.mismatch.Code, "%s", u.mismatch.Message)
	case len(u.sizes) == 0 && len(missing) > 0:
		return nil, &api.Error{Code: api.CodeNotReady, Missing: missing, Message: fmt.Sprintf(
			"no node answers for partitions %v now, and only they may have workers of the model %q with the requested block size", missing, u.query.Model)}
	case len(u.sizes) == 0:
		return nil, api.Errorf(api.CodeUnknownModel, "no worker has announced the model %q to any node", u.query.Model)
	}
	a := u.answer
	a.BlockSize, a.Blocks = u.sizes[0], max(len(u.query.Hashes), len(u.query.EngineHashes))
	if len(a.Lookaheads) > 0 {
		a.Blocks = len(u.query.HashedFor(a.Lookaheads[0]))
	}
	a.Complete, a.Missing = len(missing) == 0, missing
	slices.SortFunc(a.Partitions, func(x, y api.PartitionStatus) int { return int(x.Partition) - int(y.Partition) })
	a.Reason = api.ReasonNotCached
	switch {
	case !u.allowed:
		a.Reason = api.ReasonNotAllowed
	case a.Blocks == 0:
		a.Reason = api.ReasonNoBlocks
	}
	return a, nil
}

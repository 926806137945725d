package node

import (
	"encoding/binary"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/internal/index/sole"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// Bounds of an outline with all runs. The second is above the number of blocks of any index, and leaves room for the
// least number of hashes of each run.
const (
	allRuns   = 1 << 26
	allHashes = 1<<31 - 1
)

// maxSole bounds the blocks in the answer of a node: 512 KiB.
const maxSole = 1 << 16

// Sole returns the blocks of a model's workers in some partitions, by the only holder, and the partitions without an
// index. Any goroutine may call Sole. Writers do not wait for Sole.
func (n *Node) Sole(q *api.RemovalRequest) (*peerapi.RemovalPart, error) {
	out := &peerapi.RemovalPart{Holders: []peerapi.RemovalHolder{}, Requests: []peerapi.RemovalDepths{}}
	if len(q.Partitions) > 0 {
		out.Missing = (&scratch{reflected: n.progress(nil)}).recordServing(q.Partitions)
	}
	view := n.view()
	served, failure := view.serving(&api.Query{Model: q.Model, BlockSize: q.BlockSize}, n.registered(q.Model))
	switch {
	case failure == nil:
		out.BlockSize = served.BlockSize
	case failure.Code == api.CodeUnknownModel:
		return out, nil // other partitions have workers of the model
	default:
		return nil, failure
	}
	var found sole.Blocks
	for _, shard := range served.Shards {
		var ranks radix.RankSet
		some := false
		for _, r := range served.Ranks {
			if r.Shard == shard && slices.Contains(q.Partitions, r.Partition) && !slices.Contains(out.Missing, r.Partition) {
				ranks.Add(r.ID)
				some = true
			}
		}
		if some {
			addSole(&found, view, shard, n.shards[shard].index.Outline(radix.OutlineQuery{Space: served.Space, Most: allRuns,
				Hashes: allHashes, Among: &ranks}))
		}
	}
	var holders map[events.WorkerID][]uint64
	holders, out.Bits = found.Sample(maxSole)
	for worker, blocks := range holders {
		out.Holders = append(out.Holders, peerapi.RemovalHolder{Worker: worker, Blocks: blocks})
	}
	return out, nil
}

// addSole adds the blocks of an outline. A rank in more pieces of a run than an outline names counts as a holder of the
// whole run, and a run with more ranks than an outline names counts as held by several workers.
func addSole(found *sole.Blocks, view *View, shard int, of *radix.Outline) {
	ends := make([]uint64, len(of.Runs)) // hash of the last block and everything before it
	var holders []events.WorkerID        // of the blocks of a run; "": several
	var held []bool
	for i := range of.Runs {
		r := &of.Runs[i]
		holders, held = slices.Grow(holders[:0], int(r.Blocks))[:r.Blocks], slices.Grow(held[:0], int(r.Blocks))[:r.Blocks]
		clear(held)
		add := func(from, to uint32, worker events.WorkerID) {
			for b := from; b < to; b++ {
				if held[b] && holders[b] != worker {
					holders[b] = ""
				} else {
					holders[b], held[b] = worker, true
				}
			}
		}
		for _, id := range r.Ranks {
			worker := events.WorkerID("")
			if rank := view.Rank(shard, id); rank != nil && r.Holders <= len(r.Ranks) {
				worker = rank.Key.Instance
			}
			whole := true
			for _, p := range r.Partly {
				if p.Rank == id {
					if whole = p.Whole; whole {
						break
					}
					add(p.From, p.To, worker)
				}
			}
			if whole {
				add(0, r.Blocks, worker)
			}
		}
		seq := uint64(0)
		if r.Parent >= 0 {
			seq = ends[r.Parent]
		}
		for b, local := range r.Locals {
			var numbers [16]byte
			binary.LittleEndian.PutUint64(numbers[:], seq)
			binary.LittleEndian.PutUint64(numbers[8:], uint64(local))
			if seq = xxh3.Hash(numbers[:]); held[b] {
				found.Add(seq, holders[b])
			}
		}
		ends[i] = seq
	}
}

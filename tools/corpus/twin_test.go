package corpus

import "github.com/kvatlas/kvatlas/pkg/events"

// twin is a naive index. A path is the sequence of local hashes from the start of the prompt to a block. A worker holds
// a block while the stored copies outnumber the removed copies.
type twin struct {
	workers []map[uint64]int              // path → copies
	paths   []map[events.BlockHash]uint64 // name → path, per worker
}

func newTwin(workers uint32) *twin {
	t := &twin{}
	for range workers {
		t.workers = append(t.workers, map[uint64]int{})
		t.paths = append(t.paths, map[events.BlockHash]uint64{})
	}
	return t
}

// extend returns the path with another block. A chained 64-bit hash represents the path.
func extend(path uint64, local events.LocalHash) uint64 { return Mix(path*3 + Mix(uint64(local))) }

func (t *twin) apply(op Op) (unknown int) {
	held, paths := t.workers[op.Worker], t.paths[op.Worker]
	if op.Kind == Remove {
		for _, name := range op.Blocks {
			if path, known := paths[name]; !known || held[path] == 0 {
				unknown++
			} else if held[path]--; held[path] == 0 {
				delete(held, path)
			}
		}
		return unknown
	}
	path := uint64(0)
	if op.HasParent {
		var known bool
		if path, known = paths[op.Parent]; !known {
			return len(op.Blocks)
		}
	}
	for i, name := range op.Blocks {
		path = extend(path, op.Locals[i])
		paths[name] = path
		held[path]++
	}
	return 0
}

func (t *twin) depths(locals []events.LocalHash) []int {
	depths := make([]int, len(t.workers))
	for w, held := range t.workers {
		path := uint64(0)
		for _, local := range locals {
			if path = extend(path, local); held[path] == 0 {
				break
			}
			depths[w]++
		}
	}
	return depths
}

// play runs a whole corpus and returns the digest and the counts of the header.
func play(r *Reader) (d Digest, h Header, unknown int) {
	h = Header{Workers: r.Header().Workers, BlockSize: r.Header().BlockSize}
	t := newTwin(h.Workers)
	for _, op := range r.Ops() {
		h.Ops++
		switch op.Kind {
		case Query:
			for w, depth := range t.depths(op.Locals) {
				d.Add(int(h.Queries), uint32(w), depth)
			}
			h.Queries++
			h.QueryBlocks += uint64(len(op.Locals))
			continue
		case Store:
			h.StoreOps++
			h.Stored += uint64(len(op.Blocks))
		case Remove:
			h.RemoveOps++
			h.Removed += uint64(len(op.Blocks))
		}
		unknown += t.apply(op)
	}
	distinct := map[uint64]bool{}
	for _, held := range t.workers {
		h.LiveAtEnd += uint64(len(held))
		for path := range held {
			distinct[path] = true
		}
	}
	h.DistinctAtEnd = uint64(len(distinct))
	return d, h, unknown
}

package load

import (
	"encoding/binary"
	"math"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// twin is a naive [Table] of a single node: a map of requests, and a map of blocks for each rank. Blocks keep
// floating-point weights. twin recomputes everything for each answer.
type twin struct {
	expiry   time.Duration
	requests map[string]*twinRequest
	blocks   map[events.RankKey]map[string]float64 // weights, by the path from the root
	ranks    map[events.RankKey]bool
}

type twinRequest struct {
	Booking
	outputs  []float64
	private  []float64
	done     bool
	gone     bool
	progress time.Duration // the last restart of the expiry
}

func newTwin(expiry time.Duration) *twin {
	return &twin{expiry: expiry, requests: map[string]*twinRequest{}, blocks: map[events.RankKey]map[string]float64{},
		ranks: map[events.RankKey]bool{}}
}

func path(hashes []events.SeqHash) string {
	var b []byte
	for _, h := range hashes {
		b = binary.LittleEndian.AppendUint64(b, uint64(h))
	}
	return string(b)
}

// holders returns the number of a rank's requests with a block.
func (w *twin) holders(rank events.RankKey, block string) (n int) {
	for _, r := range w.requests {
		if !r.gone && r.Rank == rank && !r.NoReuse && len(block)/8 <= len(r.Hashes) &&
			path(r.Hashes[:len(block)/8]) == block {
			n++
		}
	}
	return n
}

func (w *twin) sweep() {
	for rank, blocks := range w.blocks {
		for block := range blocks {
			if w.holders(rank, block) == 0 {
				delete(blocks, block)
			}
		}
	}
}

func (w *twin) tick(now time.Duration) {
	for id, r := range w.requests {
		if r.progress+w.expiry <= now {
			delete(w.requests, id)
		}
	}
	w.sweep()
}

func (w *twin) book(now time.Duration, b Booking) error {
	w.tick(now)
	if w.requests[b.ID] != nil {
		return ErrConflict
	}
	r := &twinRequest{Booking: b, progress: now}
	w.requests[b.ID] = r
	w.ranks[b.Rank] = true
	if w.blocks[b.Rank] == nil {
		w.blocks[b.Rank] = map[string]float64{}
	}
	for i := range b.Hashes {
		if block := path(b.Hashes[:i+1]); b.NoReuse {
			r.private = append(r.private, 1)
		} else if _, ok := w.blocks[b.Rank][block]; !ok {
			w.blocks[b.Rank][block] = 1
		}
	}
	return nil
}

func (w *twin) find(now time.Duration, id string) (*twinRequest, error) {
	w.tick(now)
	r := w.requests[id]
	if r != nil && r.gone {
		delete(w.requests, id)
		r = nil
	}
	if r == nil {
		return nil, ErrUnknown
	}
	return r, nil
}

func (w *twin) reportProgress(now time.Duration, id string) error {
	r, err := w.find(now, id)
	if err == nil && now-r.progress >= w.expiry/8 {
		r.progress = now
	}
	return err
}

func (w *twin) prefillComplete(now time.Duration, id string) error {
	err := w.reportProgress(now, id)
	if err == nil {
		w.requests[id].done = true
	}
	return err
}

func (w *twin) outputBlock(now time.Duration, id string, f float64) error {
	if err := w.reportProgress(now, id); err != nil {
		return err
	}
	r := w.requests[id]
	r.outputs = append(r.outputs, 1)
	if f < 0 {
		return nil
	}
	for i := range r.outputs {
		r.outputs[i] = f
	}
	for i := range r.private {
		r.private[i] = f
	}
	for i := range r.Hashes {
		if block := path(r.Hashes[:i+1]); !r.NoReuse && w.holders(r.Rank, block) == 1 {
			w.blocks[r.Rank][block] = f
		}
	}
	return nil
}

func (w *twin) free(now time.Duration, id string) error {
	_, err := w.find(now, id)
	delete(w.requests, id)
	w.sweep()
	return err
}

func (w *twin) removeRank(rank events.RankKey) {
	for _, r := range w.requests {
		if r.Rank == rank {
			r.gone = true
		}
	}
	delete(w.ranks, rank)
	w.sweep()
}

// load returns the load of a rank, with the depth of a query.
func (w *twin) load(rank events.RankKey, seq []events.SeqHash) Load {
	l, sum := Load{Rank: rank}, 0.0
	for _, r := range w.requests {
		if r.gone || r.Rank != rank {
			continue
		}
		l.Requests++
		if !r.done {
			l.PrefillTokens += r.PrefillTokens
			if r.PrefillTokens > 0 {
				l.Prefilling++
			}
		}
		for _, f := range slices.Concat(r.outputs, r.private) {
			sum += f
		}
	}
	for _, f := range w.blocks[rank] {
		sum += f
	}
	for int(l.Depth) < len(seq) && w.holders(rank, path(seq[:l.Depth+1])) > 0 {
		l.Depth++
	}
	l.Blocks = int64(math.Floor(sum + 0.5))
	return l
}

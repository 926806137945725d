package registry

import (
	"context"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// maxJunk bounds the keys that are remembered for one sweep. The next watch or sweep finds the rest.
const maxJunk = 4096

// junk is the keys of the bucket that mean nothing, by revision: a NATS server lets a shim write any key below its
// worker's. Nodes erase them, so that they do not take the bucket's room. The registry's lock guards it.
type junk map[string]uint64

// see notes an entry whose key is none of a rank (isRank), or of a rank that no worker has.
func (j *junk) see(e *jetstream.Entry, isRank bool, rank events.Rank) {
	_, operator := jetstream.ParseOperatorKey(e.Key)
	switch {
	case isRank && rank < events.MaxRanks, operator, e.Key == jetstream.ProbeKey, !strings.Contains(e.Key, "."):
		return
	case *j == nil:
		*j = junk{}
	}
	if len(*j) < maxJunk {
		(*j)[e.Key] = e.Revision
	}
}

// sweepJunk erases keys that mean nothing. A failed attempt is made again with what is seen next.
func (r *Registry) sweepJunk(ctx context.Context) {
	if !r.cfg.Mine(0) {
		return // one node does it
	}
	r.mu.Lock()
	list := r.junk
	r.junk = nil
	r.mu.Unlock()
	for key, revision := range list {
		if r.cfg.Bucket.Erase(ctx, key, revision) != nil {
			return
		}
	}
}

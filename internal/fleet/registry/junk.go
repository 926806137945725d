package registry

import (
	"context"

	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// maxJunk bounds the keys that are remembered for one sweep. The next watch or sweep finds the rest.
const maxJunk = 4096

// junk is the keys of the bucket that mean nothing, by revision: a NATS server lets a shim write any key below its
// worker's. Nodes erase them, so that they do not take the bucket's room. The registry's lock guards it.
type junk map[string]uint64

// see notes an entry if its key means nothing.
func (j *junk) see(e *jetstream.Entry) {
	if !jetstream.JunkKey(e.Key) || len(*j) >= maxJunk {
		return
	}
	if *j == nil {
		*j = junk{}
	}
	(*j)[e.Key] = e.Revision
}

// sweepJunk erases keys that mean nothing. After a failure the rest stays until a watch shows it again.
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

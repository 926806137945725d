package registry

import (
	"context"

	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// maxJunk is the maximum number of keys per sweep. The next watch or sweep finds the rest.
const maxJunk = 4096

// junk has the meaningless keys of the bucket, with revisions. A NATS server lets a shim write any key below the key of
// its worker. Nodes erase the keys to save space in the bucket. The registry's lock guards junk.
type junk map[string]uint64

// see records an entry with a meaningless key.
func (j *junk) see(e *jetstream.Entry) {
	if !jetstream.JunkKey(e.Key) || len(*j) >= maxJunk {
		return
	}
	if *j == nil {
		*j = junk{}
	}
	(*j)[e.Key] = e.Revision
}

// sweepJunk erases meaningless keys. After a failure, the rest stays until a watch shows it again.
func (r *Registry) sweepJunk(ctx context.Context) {
	if !r.cfg.Mine(0) {
		return // a single node sweeps
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

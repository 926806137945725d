package server

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/choose/hot"
	"github.com/kvatlas/kvatlas/internal/fleet/regions"
	"github.com/kvatlas/kvatlas/internal/index/node"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// regionShare limits the share of a core for digests: the pause after a digest is at least this many times as long as
// its construction.
const regionShare = 20

// exchangeDigests receives and publishes digests until ctx ends.
func (s *Server) exchangeDigests(ctx context.Context) {
	var parts sync.WaitGroup
	defer parts.Wait()
	names, failed := jetstream.Names(s.Namespace), func(err error) {
		s.log.Warn("cannot subscribe to the digests of regions; retrying", "error", err, "what_to_do",
			"grant the subject to this user: indexer auth create prints the permissions of every user")
	}
	parts.Go(func() { s.Conn.KeepSubscribed(ctx, names.RegionDigests(), s.receiveDigest, failed) })
	parts.Go(func() { s.Conn.KeepSubscribed(ctx, names.OwnRegion(), s.receiveRegion, failed) })
	parts.Go(func() {
		for loop.Wait(ctx, s.regional.MaxAge/4) {
			s.regional.tick()
		}
	})
	select {
	case <-s.ready:
	case <-ctx.Done():
		return
	}
	incarnation, warned := uint64(time.Now().UnixMilli()), ""
	for number := uint64(1); ; number++ {
		begun := time.Now()
		if err := s.publishDigest(incarnation, number); err != nil && err.Error() != warned {
			warned = err.Error()
			s.log.Warn("the digest for other regions is not published; they report this region as unknown", "error", err,
				"what_to_do", "check that NATS answers; with an error about models or bytes, reduce --region-digest-bytes")
		}
		if !loop.Wait(ctx, max(s.regional.Interval, regionShare*time.Since(begun))) {
			return
		}
	}
}

func (r *regional) tick() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.machine.Tick(r.now()) {
		r.view.Store(r.machine.View())
	}
}

// publishDigest makes and sends the digest of the partitions that this node writes. Digests are not sent while NATS is
// away: the client would send old ones afterwards.
func (s *Server) publishDigest(incarnation, number uint64) error {
	r := s.regional
	if !s.Conn.Connected() {
		return nil
	}
	begun := time.Now()
	made := s.digest()
	took := time.Since(begun)
	messages, err := made.Messages(incarnation, number, uint64(took.Milliseconds()))
	subject, named := jetstream.Names(s.Namespace).RegionDigest(r.Name, s.ID)
	if err == nil {
		err = named
	}
	bytes := 0
	for _, m := range messages {
		if err == nil {
			err = s.Conn.Send(subject, api.MsgPack, m)
		}
		bytes += len(m)
	}
	if err == nil {
		err = s.Conn.Send(jetstream.Names(s.Namespace).OwnRegion(), api.MsgPack, []byte(r.Name))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	p := &r.published
	if err != nil {
		p.Failed++
		return err
	}
	p.Published, p.PublishedBytes, p.DigestBytes = p.Published+1, p.PublishedBytes+uint64(bytes), uint64(bytes)
	p.MadeInMS, p.DigestBlocks, p.HeldBlocks = float64(took.Microseconds())/1000, 0, 0
	for _, set := range made.Sets {
		p.DigestBlocks, p.HeldBlocks = p.DigestBlocks+uint64(set.Filter.Len()), p.HeldBlocks+set.Held
	}
	return nil
}

// digest returns the digest of the partitions that this node writes.
func (s *Server) digest() *regions.Digest {
	sets, covered := s.node.PrefixSets(node.PrefixQuery{Covers: s.views.Now().Writes, Hot: s.hotPrompts,
		Most: regions.Capacity(s.regional.DigestBytes)})
	d := &regions.Digest{Partitions: s.ns.Partitions(), Covered: covered}
	for i := range sets {
		set := &sets[i]
		f := regions.NewFilter(set.Hashes)
		d.Sets = append(d.Sets, regions.Set{Model: set.Model, BlockSize: set.BlockSize, Lookaheads: set.Lookaheads,
			Held: uint64(f.Len()) + set.Left, Bounded: set.Bounded, Filter: f})
	}
	return d
}

// hotPrompts returns the hot prefixes of a model on this node, which routes a part of the region's requests.
func (s *Server) hotPrompts(model string) (list [][]events.LocalHash) {
	h := s.hots
	if h == nil {
		return nil
	}
	h.mu.Lock()
	m := h.models[model]
	h.mu.Unlock()
	if m == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.tracker.Prefixes(s.loads.Now(), hot.Listed) {
		list = append(list, p.Locals)
	}
	return list
}

// receiveDigest applies a message of another region.
func (s *Server) receiveDigest(m jetstream.Request) {
	r := s.regional
	region, name, ok := jetstream.Names(s.Namespace).ParseRegionDigest(m.Subject)
	if !ok {
		return // of a later version
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if region == r.Name {
		if !slices.Contains(s.nodes(), name) {
			r.twin.note(name, r.now(), r.MaxAge)
		}
		return
	}
	changed, err := r.machine.Receive(r.now(), region, name, m.Body)
	if err != nil {
		s.log.Debug("a digest of another region cannot be read and is skipped", "region", region, "node", name, "error", err)
	}
	if changed {
		r.view.Store(r.machine.View())
	}
}

package server

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/choose/hot"
	"github.com/kvatlas/kvatlas/internal/fleet/regions"
	"github.com/kvatlas/kvatlas/internal/index/node"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Regions configures the exchange of digests with other regions.
type Regions struct {
	Name        string        // of this node's region; empty disables the exchange
	Prices      []string      // REGION=MS, of requests in other regions
	DigestBytes int           // of this node's filters, at most
	Interval    time.Duration // between digests
	MaxAge      time.Duration // after which a digest counts as unknown
}

// regional is the exchange of digests of a node with a region.
type regional struct {
	Regions
	began time.Time // of the machine's times

	view atomic.Pointer[regions.View]

	mu        sync.Mutex
	machine   *regions.Machine
	published api.RegionsStatus // of the own digests; without figures of other regions
	leaks     uint64            // messages of other regions on the subject of the own region
	leaking   sighting          // region with such messages
	twin      sighting          // node outside of the cluster that publishes digests with the name of the own region
}

// sighting is a name with a wrong configuration.
type sighting struct {
	name        string
	since, last time.Duration
}

// note records a message of a name, unless another name sent one recently.
func (x *sighting) note(name string, now, recent time.Duration) {
	if now-x.last > recent {
		*x = sighting{}
	}
	if x.name == "" {
		*x = sighting{name: name, since: now}
	}
	if x.name == name {
		x.last = now
	}
}

// persists reports whether the last message is recent, and the first one is at least this old.
func (x *sighting) persists(now, recent, old time.Duration) bool {
	return x.name != "" && now-x.last <= recent && now-x.since >= old
}

// newRegional returns the exchange of digests, or nil without a region.
func (s *Server) newRegional() (*regional, error) {
	if s.Regions.Name == "" {
		return nil, nil
	}
	prices, err := regions.ParsePrices(s.Regions.Prices)
	if err != nil {
		return nil, fmt.Errorf("price of a region: %w", err)
	}
	r := &regional{Regions: s.Regions, began: time.Now(),
		machine: regions.New(regions.Config{Region: s.Regions.Name, Prices: prices, MaxAge: s.Regions.MaxAge})}
	r.view.Store(r.machine.View())
	return r, nil
}

func (r *regional) now() time.Duration { return time.Since(r.began) }

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
				"what_to_do", "see that NATS answers; with an error about models or bytes, reduce --region-digest-bytes")
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

// receiveRegion counts messages of other regions on the subject that servers must not pass on.
func (s *Server) receiveRegion(m jetstream.Request) {
	r, name := s.regional, string(m.Body)
	if name == r.Name || regions.CheckName(name) != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.leaks++; r.leaks == 1 {
		s.log.Warn("requests reach other regions: NATS passes on more than digests", "region", name, "what_to_do", leakRemedy)
	}
	r.leaking.note(name, r.now(), r.MaxAge)
}

const leakRemedy = "permit only the digests' subject on the leaf node connections; see docs/regions.md"

// regionsStatus returns the state of the exchange, or nil without a region, and warnings.
func (s *Server) regionsStatus() (out *api.RegionsStatus, warnings []string) {
	r := s.regional
	if r == nil {
		return nil, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	now, c, status := r.now(), r.machine.Counts(), r.published
	out = &status
	out.Region, out.Leaks = r.Name, r.leaks
	out.Received, out.Malformed, out.Broken, out.Refused = c.Digests, c.Malformed, c.Broken, c.Refused
	out.Regions = append([]api.RegionStatus{}, r.view.Load().Status(now)...)
	if r.leaking.persists(now, r.MaxAge, 0) {
		warnings = append(warnings, fmt.Sprintf("requests of region %s reach this region: NATS passes on more than digests; "+
			"what to do: %s", r.leaking.name, leakRemedy))
	}
	if r.twin.persists(now, r.MaxAge, r.MaxAge) { // a node that joins may be unknown at first
		warnings = append(warnings, fmt.Sprintf("node %s of another cluster publishes digests with this region's name, %s, "+
			"which are ignored; what to do: start its indexer serve with another --region", r.twin.name, r.Name))
	}
	for _, x := range out.Regions {
		if x.PriceMS != nil && x.State == api.RegionUnknown && now > r.MaxAge {
			warnings = append(warnings, fmt.Sprintf("the blocks of region %s are unknown: %s; what to do: see that its nodes "+
				"run with --region %s, and that NATS connects the regions; docs/regions.md", x.Region, x.Reason, x.Region))
		}
	}
	return out, warnings
}

// findRegions is Find with the prefixes of all regions.
func (s *Server) findRegions(ctx context.Context, q *api.Query) (*api.Answer, error) {
	if s.regional == nil {
		return nil, errNoRegion()
	}
	asked := *q
	asked.Regions = false
	a, err := s.Find(ctx, &asked)
	if err != nil {
		return nil, err
	}
	a.Regions, err = s.prefixesOfRegions(q, s.ownPrefix(a), a.BlockSize)
	return a, err
}

func errNoRegion() error {
	return api.Errorf(api.CodeMalformed, "the request has regions, and this node has no region: start indexer serve with "+
		"--region, or omit regions")
}

// choose chooses a worker within the quota of a tenant, and adds the prefixes of all regions if requested.
func (s *Server) choose(ctx context.Context, q *api.SelectRequest) (*api.Selection, error) {
	if !q.Regions {
		return s.chooseInQuota(ctx, q)
	}
	if s.regional == nil {
		return nil, errNoRegion()
	}
	own := api.RegionPrefix{Region: s.regional.Name, Local: true, State: api.RegionUnknown,
		Reason: "the choice needed no lookup"}
	answered := q.Answered
	q.Regions, q.Answered = false, func(a *api.Answer) {
		own = s.ownPrefix(a)
		if answered != nil {
			answered(a)
		}
	}
	out, err := s.chooseInQuota(ctx, q)
	q.Regions, q.Answered = true, answered
	if err != nil {
		return nil, err
	}
	out.Regions, err = s.prefixesOfRegions(&q.Query, own, out.BlockSize)
	return out, err
}

// ownPrefix returns the longest prefix of the answer, which is of this node's region.
func (s *Server) ownPrefix(a *api.Answer) api.RegionPrefix {
	p := api.RegionPrefix{Region: s.regional.Name, Local: true, State: api.RegionComplete}
	lists := [][]api.Overlap{a.Workers}
	for _, list := range a.ByEndpoint {
		lists = append(lists, list)
	}
	for _, list := range lists {
		for i := range list {
			p.Blocks = max(p.Blocks, list[i].Total())
		}
	}
	p.Tokens = uint64(p.Blocks) * uint64(a.BlockSize)
	if !a.Complete {
		p.State, p.Reason = api.RegionPartial, fmt.Sprintf("partitions %v are not available", a.Missing)
	}
	return p
}

// prefixesOfRegions returns the prefixes of the own region and of the others. blockSize is of the given hashes.
func (s *Server) prefixesOfRegions(q *api.Query, own api.RegionPrefix, blockSize uint32) ([]api.RegionPrefix, error) {
	question := &regions.Question{Model: q.Model, BlockSize: q.BlockSize,
		Locals: func(blockSize, lookahead uint32) ([]events.LocalHash, error) {
			return q.Locals(nil, blockSize, lookahead)
		}}
	switch {
	case q.EngineHashes != nil || q.Hashed != nil:
		question.Unknown = "digests have no hashes of engines: send tokens"
	case q.Hashes != nil:
		question.BlockSize = blockSize
		question.Locals = func(uint32, uint32) ([]events.LocalHash, error) { return locals(q.Hashes), nil }
	case q.Tokens == nil:
		question.Unknown = "the request has no tokens"
	}
	others, err := s.regional.view.Load().Prefixes(s.regional.now(), question)
	return append([]api.RegionPrefix{own}, others...), err
}

// unknownRegions marks all prefixes as unknown, for a prompt without tokens.
func unknownRegions(list []api.RegionPrefix) {
	for i := range list {
		p := &list[i]
		*p = api.RegionPrefix{Region: p.Region, Local: p.Local, PriceMS: p.PriceMS, State: api.RegionUnknown,
			Reason: strings.ReplaceAll(string(api.ReasonNoTokens), "_", " ")}
	}
}

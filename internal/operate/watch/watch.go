// Package watch computes the content of the live page: the state of all ranks, and the status of all nodes.
//
// A [Hub] computes the content once for all watchers. It computes only while watchers exist, and uses at most a fixed
// share of one core. A watcher first receives the complete content, and then the changes. A slow watcher receives the
// complete content again instead of the missed changes, so no changes are queued. Without changes a watcher receives a
// comment at intervals, which distinguishes a quiet node from a stopped node.
package watch

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Source provides the watched content. Its methods must be safe for concurrent use.
type Source interface {
	Workers(ctx context.Context, asked api.WorkersRequest) (*api.WorkerList, error)
	Loads(ctx context.Context) (*api.LoadList, error)
	EngineLoads(ctx context.Context) (*api.EngineLoads, error)
	Nodes() []string
	StatusOf(ctx context.Context, node string) (*api.Status, error)
}

// Config configures a Hub.
type Config struct {
	Self   string // name of this node
	Source Source

	// Most bounds the number of watchers; default 100.
	Most int

	// Fleet and Cluster are the minimum intervals between two polls; default 1 s and 5 s. The pause after a slow poll
	// is 40 times its duration, at most 30 s.
	Fleet, Cluster time.Duration
}

// Bounds on the cost of polls.
const (
	pauseFactor  = 40
	longestPause = 30 * time.Second
	lookTimeout  = 10 * time.Second
)

// Silence is the longest interval without data for a watcher. The page closes a stream after three times as long.
const Silence = 5 * time.Second

// still is a comment of server-sent events, which readers skip.
var still = []byte(":\n\n")

// Hub holds the latest poll of each topic. It is safe for concurrent use.
type Hub struct {
	cfg Config

	mu       sync.Mutex
	watchers int
	changed  chan struct{} // closed on a change
	ended    bool
	topics   [2]*look // fleet, cluster; nil before the first poll for the present watchers

	begun chan struct{} // receives a value when a watcher joins

	// The last poll of the fleet; owned by the goroutine in Run.
	ranks   []api.FleetRank
	expired []api.ExpiredWorker
	at      time.Time
}

// look is the result of a poll, in the form in which it is sent.
type look struct {
	version uint64
	changes []byte        // changes since version-1; nil without a previous poll
	full    func() []byte // returns the complete content
	due     time.Time     // time of the next poll
}

// New returns a Hub. The caller must call Run.
func New(cfg Config) *Hub {
	cfg.Most = cmp.Or(cfg.Most, 100)
	cfg.Fleet, cfg.Cluster = cmp.Or(cfg.Fleet, time.Second), cmp.Or(cfg.Cluster, 5*time.Second)
	return &Hub{cfg: cfg, begun: make(chan struct{}, 1), changed: make(chan struct{})}
}

// Run polls while watchers exist, until ctx ends. Then all watchers are disconnected.
func (h *Hub) Run(ctx context.Context) {
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.ended = true
		close(h.changed)
	}()
	var version [2]uint64
	var due [2]time.Time
	least := [2]time.Duration{h.cfg.Fleet, h.cfg.Cluster}
	for {
		if h.watched() {
			for i, see := range []func(context.Context) ([]byte, func() []byte){h.fleet, h.cluster} {
				begun := time.Now()
				if begun.Before(due[i]) {
					continue
				}
				looking, cancel := context.WithTimeout(ctx, lookTimeout)
				changes, full := see(looking)
				cancel()
				if ctx.Err() != nil {
					return
				}
				version[i]++
				took := time.Since(begun)
				due[i] = begun.Add(took + min(longestPause, max(least[i]-took, pauseFactor*took)))
				h.publish(i, &look{version[i], changes, full, due[i]})
			}
		}
		var next <-chan time.Time // nil without watchers
		if h.watched() {
			at := due[0]
			if due[1].Before(at) {
				at = due[1]
			}
			next = time.After(time.Until(at))
		}
		select {
		case <-next:
		case <-h.begun:
		case <-ctx.Done():
			return
		}
	}
}

func (h *Hub) watched() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.watchers > 0
}

// publish stores a poll and wakes the watchers.
func (h *Hub) publish(topic int, l *look) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.topics[topic] = l
	close(h.changed)
	h.changed = make(chan struct{})
}

// Watch sends the present content, and then changes, until ctx ends, the hub ends or send fails. It sends whole
// server-sent events, or a comment after [Silence] without an event. send must not modify the bytes. The error is an
// [api.Error] at the limit of watchers, or the error of send.
func (h *Hub) Watch(ctx context.Context, send func(event []byte) error) error {
	h.mu.Lock()
	if h.watchers >= h.cfg.Most {
		h.mu.Unlock()
		return api.Errorf(api.CodeBusy, "%d pages already watch this node; close a page, or watch another node", h.cfg.Most)
	}
	if h.watchers++; h.watchers == 1 {
		for i, l := range h.topics {
			if l != nil && time.Now().After(l.due) { // the poll is old: there were no watchers
				h.topics[i] = nil
			}
		}
		loop.Wake(h.begun)
	}
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.watchers--
	}()
	var had [2]uint64
	for {
		h.mu.Lock()
		topics, changed, ended := h.topics, h.changed, h.ended
		h.mu.Unlock()
		if ended || ctx.Err() != nil {
			return nil
		}
		for i, l := range topics {
			if l == nil || l.version == had[i] {
				continue
			}
			event := l.changes
			if event == nil || had[i] == 0 || l.version != had[i]+1 {
				event = l.full()
			}
			if err := send(event); err != nil {
				return err
			}
			had[i] = l.version
		}
		select {
		case <-changed:
		case <-time.After(Silence):
			if err := send(still); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// event returns a server-sent event.
func event(name string, data any) []byte {
	text, err := json.Marshal(data)
	if err != nil {
		text, name = nil, "unreadable" // our own values always encode
	}
	return slices.Concat([]byte("event: "+name+"\ndata: "), bytes.TrimSpace(text), []byte("\n\n"))
}

// fleet polls all ranks.
func (h *Hub) fleet(ctx context.Context) (changes []byte, full func() []byte) {
	list, err := h.cfg.Source.Workers(ctx, api.WorkersRequest{})
	now := time.Now().UTC().Round(time.Millisecond)
	if err != nil {
		failed := event(api.EventFleet, api.FleetEvent{At: now, Full: true, Ranks: []api.FleetRank{},
			Error: api.AsError(err)})
		h.ranks = nil
		return nil, func() []byte { return failed }
	}
	loads, err := h.cfg.Source.Loads(ctx)
	if err != nil {
		loads = nil
	}
	engines, err := h.cfg.Source.EngineLoads(ctx)
	if err != nil {
		engines = nil
	}
	ranks := Ranks(list, loads, engines, h.ranks, now.Sub(h.at))
	expired := append([]api.ExpiredWorker{}, list.Expired...) // never nil
	all := api.FleetEvent{At: now, Full: true, Ranks: ranks, Missing: list.Missing, Expired: expired}
	some := api.FleetEvent{At: now, Missing: list.Missing}
	some.Ranks, some.Gone = difference(ranks, h.ranks)
	if !slices.Equal(expired, h.expired) {
		some.Expired = expired
	}
	if h.ranks != nil {
		changes = event(api.EventFleet, some)
	}
	h.ranks, h.expired, h.at = ranks, expired, now
	return changes, sync.OnceValue(func() []byte { return event(api.EventFleet, all) })
}

// Ranks returns the ranks of a list, in its order. It adds the loads (not nil), and the rates since an earlier poll
// before.
func Ranks(list *api.WorkerList, loads *api.LoadList, engines *api.EngineLoads, before []api.FleetRank,
	since time.Duration) []api.FleetRank {
	ranks := make([]api.FleetRank, len(list.Workers))
	for i := range list.Workers {
		w := &list.Workers[i]
		r := api.FleetRank{
			Instance: w.Instance, Rank: w.Rank, Model: w.Model, BlockSize: w.BlockSize, Partition: w.Partition,
			Blocks: w.Blocks, Pending: w.Pending, LastSeen: w.LastSeen, Incarnation: w.Incarnation, Stored: w.Stored,
			Removed: w.Removed, Engine: w.Engine, EngineWhy: w.EngineWhy, CatchingUp: w.CatchingUp,
		}
		if w.Lease != nil {
			r.Lease, r.LeaseHost = w.Lease.State, w.Lease.Host
		}
		if w.Record != nil {
			r.State, r.Why = w.Record.State, strings.Join(w.Record.Reasons, "; ")
			r.Role, r.Endpoint, r.TotalBlocks = w.Record.Role, w.Record.Endpoint, w.Record.TotalKVBlocks
		}
		ranks[i] = r
	}
	if loads != nil {
		addLoads(ranks, loads)
	}
	if engines != nil {
		addEngines(ranks, engines)
	}
	addRates(ranks, before, since)
	return ranks
}

func find(ranks []api.FleetRank, place api.RankPlace) *api.FleetRank {
	i, found := slices.BinarySearchFunc(ranks, place,
		func(r api.FleetRank, p api.RankPlace) int { return r.Place().Compare(p) })
	if !found {
		return nil
	}
	return &ranks[i]
}

func addLoads(ranks []api.FleetRank, loads *api.LoadList) {
	for _, model := range loads.Models {
		for _, l := range model.Ranks {
			if r := find(ranks, api.RankPlace{Instance: l.Worker, Rank: l.Rank}); r != nil && r.Model == model.Model {
				r.Requests, r.PrefillTokens, r.ActiveBlocks = l.ActiveRequests, l.ActivePrefillTokens, l.ActiveBlocks
			}
		}
	}
}

func addEngines(ranks []api.FleetRank, engines *api.EngineLoads) {
	for _, l := range slices.Backward(engines.Loads) { // newest first
		r := find(ranks, api.RankPlace{Instance: l.Worker, Rank: l.Rank})
		if r != nil && l.UsedBlocks != nil {
			r.UsedBlocks = *l.UsedBlocks
		}
		if r != nil && l.TotalBlocks != nil {
			r.TotalBlocks = *l.TotalBlocks
		}
	}
}

// addRates computes the blocks stored and removed per second since an earlier poll.
func addRates(ranks, before []api.FleetRank, since time.Duration) {
	for i := range ranks {
		r := &ranks[i]
		was := find(before, r.Place())
		if was == nil || was.Incarnation != r.Incarnation || since <= 0 {
			continue
		}
		rate := func(now, then uint64) float64 {
			return math.Round(float64(now-min(then, now))/since.Seconds()*10) / 10
		}
		r.StoredRate, r.RemovedRate = rate(r.Stored, was.Stored), rate(r.Removed, was.Removed)
	}
}

// difference returns the new and changed ranks, and the removed ranks. Both lists are sorted.
func difference(now, before []api.FleetRank) (changed []api.FleetRank, gone []api.RankPlace) {
	changed = []api.FleetRank{}
	for i := range now {
		for len(before) > 0 && before[0].Place().Compare(now[i].Place()) < 0 {
			gone, before = append(gone, before[0].Place()), before[1:]
		}
		same := len(before) > 0 && before[0].Place() == now[i].Place()
		if !same || before[0] != now[i] {
			changed = append(changed, now[i])
		}
		if same {
			before = before[1:]
		}
	}
	for i := range before {
		gone = append(gone, before[i].Place())
	}
	return changed, gone
}

// cluster requests the status of all nodes. Problems and requests may be incomplete.
func (h *Hub) cluster(ctx context.Context) (changes []byte, full func() []byte) {
	names := h.cfg.Source.Nodes()
	nodes := make([]api.NodeState, len(names))
	var asked sync.WaitGroup
	for i, name := range names {
		asked.Go(func() {
			nodes[i].Node = name
			status, err := h.cfg.Source.StatusOf(ctx, name)
			if err != nil {
				nodes[i].Error = api.AsError(err)
				return
			}
			nodes[i].Status = status
		})
	}
	asked.Wait()
	statuses := make([]*api.Status, len(nodes))
	for i := range nodes {
		statuses[i] = nodes[i].Status
	}
	zones := survey.Zones(statuses)
	for i := range nodes {
		nodes[i].Zone = zones[nodes[i].Node]
	}
	now := time.Now().UTC().Round(time.Millisecond)
	return nil, sync.OnceValue(func() []byte {
		return event(api.EventCluster, api.ClusterEvent{At: now, Node: h.cfg.Self, Nodes: nodes})
	})
}

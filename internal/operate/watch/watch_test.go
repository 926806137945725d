package watch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// fleet is a source that counts polls. Tests change it between polls.
type fleet struct {
	mu       sync.Mutex
	looks    int
	cost     time.Duration // duration of a poll
	err      error
	workers  []api.WorkerInfo
	expired  []api.ExpiredWorker
	requests uint64
}

func (f *fleet) Workers(context.Context, api.WorkersRequest) (*api.WorkerList, error) {
	time.Sleep(f.cost)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.looks++
	list := &api.WorkerList{Workers: append([]api.WorkerInfo(nil), f.workers...), Expired: f.expired}
	return list, f.err
}

// seen returns the number of polls.
func (f *fleet) seen() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.looks
}

// change changes the source.
func (f *fleet) change(how func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	how()
}

func (f *fleet) Loads(context.Context) (*api.LoadList, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &api.LoadList{Models: []api.ModelLoads{{Model: "m", Ranks: []api.RankLoad{{Worker: "w2",
		ActiveRequests: f.requests}}}}}, nil
}

func (f *fleet) EngineLoads(context.Context) (*api.EngineLoads, error) {
	used := uint64(7)
	return &api.EngineLoads{Loads: []api.EngineLoad{{Worker: "w1", UsedBlocks: &used}}}, nil
}

func (f *fleet) Nodes() []string { return []string{"a", "b"} }

func (f *fleet) StatusOf(_ context.Context, node string) (*api.Status, error) {
	if node == "b" {
		return nil, api.Errorf(api.CodeUnavailable, "it is away")
	}
	return &api.Status{Node: node, Cluster: &api.ClusterStatus{Nodes: []api.NodeStatus{{Node: "a", Zone: "rack-1"},
		{Node: "b", Zone: "rack-2"}}}}, nil
}

func worker(name string, stored uint64) api.WorkerInfo {
	return api.WorkerInfo{Instance: events.WorkerID(name), Model: "m", Incarnation: 1, Stored: stored}
}

// watcher receives the events of a hub.
type watcher struct {
	t      *testing.T
	mu     sync.Mutex
	names  []string
	fleets []api.FleetEvent
	nodes  []api.NodeState // from the latest cluster event
	still  int             // number of comments
}

// got returns the names of the received events, and the received fleet events.
func (w *watcher) got() ([]string, []api.FleetEvent) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.names), slices.Clone(w.fleets)
}

func (w *watcher) send(event []byte) error {
	if string(event) == ":\n\n" {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.still++
		return nil
	}
	name, data, found := strings.Cut(strings.TrimPrefix(string(event), "event: "), "\ndata: ")
	if !found || !strings.HasSuffix(data, "\n\n") || strings.Count(data, "\n") != 2 {
		w.t.Errorf("no event: %q", event)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.names = append(w.names, name)
	if name == api.EventFleet {
		var f api.FleetEvent
		if err := json.Unmarshal([]byte(data), &f); err != nil {
			w.t.Error(err)
		}
		w.fleets = append(w.fleets, f)
	}
	if name == api.EventCluster {
		var c api.ClusterEvent
		if err := json.Unmarshal([]byte(data), &c); err != nil {
			w.t.Error(err)
		}
		w.nodes = c.Nodes
	}
	return nil
}

// TestChanges: a watcher receives the complete content, and then the changes, with rates and loads.
func TestChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		f := &fleet{workers: []api.WorkerInfo{worker("w1", 100), worker("w2", 0), worker("w3", 0)}}
		h := New(Config{Self: "a", Source: f})
		go h.Run(ctx)
		time.Sleep(time.Minute)
		synctest.Wait()
		if f.seen() != 0 {
			t.Errorf("%d polls without a watcher", f.seen())
		}
		w := &watcher{t: t}
		go h.Watch(ctx, w.send)
		synctest.Wait()
		names, fleets := w.got()
		if fmt.Sprint(names) != "[fleet cluster]" || !fleets[0].Full || len(fleets[0].Ranks) != 3 ||
			fleets[0].Ranks[0].UsedBlocks != 7 || fleets[0].Expired == nil || len(fleets[0].Expired) > 0 {
			t.Fatalf("%v %+v", names, fleets)
		}
		f.change(func() {
			f.workers, f.requests = []api.WorkerInfo{worker("w1", 150), worker("w2", 0)}, 2
			f.expired = []api.ExpiredWorker{{Instance: "w3"}}
		})
		time.Sleep(time.Second)
		synctest.Wait()
		_, fleets = w.got()
		next := fleets[1]
		if next.Full || len(next.Ranks) != 2 || next.Ranks[0].StoredRate != 50 || next.Ranks[1].Requests != 2 ||
			len(next.Gone) != 1 || next.Gone[0].Instance != "w3" || !slices.Equal(next.Expired, f.expired) {
			t.Errorf("%+v", next)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		_, fleets = w.got()
		last := fleets[2]
		if len(last.Ranks) != 1 || last.Ranks[0].StoredRate != 0 || last.Expired != nil { // w1's rate is 0 again
			t.Errorf("%+v", last)
		}
		f.change(func() { f.expired = nil })
		time.Sleep(time.Second)
		synctest.Wait()
		if _, fleets = w.got(); fleets[3].Expired == nil || len(fleets[3].Expired) > 0 {
			t.Errorf("expired workers left: %+v", fleets[3])
		}
		f.change(func() { f.err = errors.New("not now") })
		time.Sleep(time.Second)
		synctest.Wait()
		_, fleets = w.got()
		if last := fleets[4]; last.Error == nil || !last.Full {
			t.Errorf("%+v", last)
		}
		f.change(func() { f.err = nil })
		time.Sleep(time.Second)
		synctest.Wait()
		_, fleets = w.got()
		if last := fleets[5]; last.Error != nil || !last.Full || len(last.Ranks) != 2 {
			t.Errorf("%+v", last)
		}
		cancel()
		synctest.Wait()
	})
}

// TestZones: each node has its zone, even a node that does not answer, if another node reports its zone.
func TestZones(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		h := New(Config{Self: "a", Source: &fleet{}})
		go h.Run(ctx)
		w := &watcher{t: t}
		go h.Watch(ctx, w.send)
		synctest.Wait()
		w.got()
		if n := w.nodes; len(n) != 2 || n[0].Zone != "rack-1" || n[1].Status != nil || n[1].Zone != "rack-2" {
			t.Errorf("%+v", n)
		}
		cancel()
		synctest.Wait()
	})
}

// TestShared: many watchers cost as much as one. A slow watcher receives the complete content instead of the missed
// changes. Without watchers there are no polls.
func TestShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fleet{workers: []api.WorkerInfo{worker("w1", 0)}}
		h := New(Config{Source: f, Most: 11})
		go h.Run(t.Context())
		watching, leave := context.WithCancel(t.Context())
		for range 10 {
			go h.Watch(watching, (&watcher{t: t}).send)
		}
		slow := &watcher{t: t}
		go h.Watch(watching, func(event []byte) error {
			time.Sleep(2500 * time.Millisecond)
			return slow.send(event)
		})
		synctest.Wait()
		if err := h.Watch(watching, nil); api.AsError(err).Code != api.CodeBusy {
			t.Errorf("a watcher above the limit: %v", err)
		}
		time.Sleep(20*time.Second + 100*time.Millisecond)
		synctest.Wait()
		if f.seen() > 22 {
			t.Errorf("%d polls in 20 s", f.seen())
		}
		_, fleets := slow.got()
		for _, e := range fleets {
			if !e.Full {
				t.Errorf("a slow watcher was sent %+v", e)
			}
		}
		leave()
		time.Sleep(10*time.Second + 100*time.Millisecond) // the slow watcher receives its event first
		synctest.Wait()
		before := f.seen()
		time.Sleep(time.Minute)
		synctest.Wait()
		if f.seen() > before {
			t.Error("a poll without a watcher")
		}
	})
}

// TestSilence: a watcher receives data every few seconds, even during a long poll and between polls.
func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := New(Config{Source: &fleet{cost: lookTimeout}})
		go h.Run(t.Context())
		watching, leave := context.WithCancel(t.Context())
		w := &watcher{t: t}
		last, longest := time.Now(), time.Duration(0)
		go h.Watch(watching, func(event []byte) error {
			longest, last = max(longest, time.Since(last)), time.Now()
			return w.send(event)
		})
		time.Sleep(time.Minute)
		leave()
		synctest.Wait()
		if names, _ := w.got(); longest > Silence || w.still == 0 || len(names) < 3 {
			t.Errorf("nothing was sent for %v, with %v and %d comments", longest, names, w.still)
		}
	})
}

// TestCost: polls use at most a fortieth of the time.
func TestCost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fleet{workers: []api.WorkerInfo{worker("w1", 0)}, cost: 100 * time.Millisecond}
		h := New(Config{Source: f})
		go h.Run(t.Context())
		go h.Watch(t.Context(), (&watcher{t: t}).send)
		time.Sleep(100 * time.Second)
		synctest.Wait()
		if f.seen() < 20 || f.seen() > 25 {
			t.Errorf("%d polls of 100 ms in 100 s", f.seen())
		}
	})
}

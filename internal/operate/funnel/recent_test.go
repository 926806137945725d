package funnel

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestRecorded: the newest requests of a model are listed page by page, also over several nodes, and a single request
// is shown with the hashes of its blocks. Old requests are deleted, and the storage is bounded.
func TestRecorded(t *testing.T) {
	ctx := t.Context()
	at := time.Unix(1_800_000_000, 0)
	var nodes []*Tracker
	for _, name := range []string{"a", "b-2"} {
		tracker := New(Config{Node: name})
		go tracker.Run(ctx)
		nodes = append(nodes, tracker)
		for i := range 200 {
			r := &Request{At: at.Add(time.Duration(i/2) * time.Second), Model: "m", BlockSize: 16, Tokens: make([]uint32, 40),
				Space: events.Space{Salt: "s"}}
			r.Tokens[0] = uint32(i)
			if i == 199 {
				r.Routed, r.ID, r.Worker, r.Held, r.Selected, r.Eligible = true, "r", "w", 2, 1, 2
			}
			tracker.Record(r)
			tracker.Record(&Request{At: at, Model: "other", BlockSize: 16})
		}
	}
	ask := func(q api.RecordedRequest) *api.RecordedList {
		t.Helper()
		q.Model = "m"
		all := &api.RecordedList{}
		for _, n := range nodes {
			part, err := n.Recorded(ctx, &q)
			if err != nil {
				t.Fatal(err)
			}
			MergeRecorded(all, part, &q)
		}
		return all
	}
	var ids []string
	for before := ""; ; before = ids[len(ids)-1] {
		list := ask(api.RecordedRequest{Before: before, Limit: 50})
		for _, r := range list.Requests {
			if r.Hashes != nil || r.Blocks != 2 || r.ISLTokens != 40 {
				t.Fatalf("%+v", r)
			}
			ids = append(ids, r.ID)
		}
		if !list.More {
			break
		}
	}
	if len(ids) != 2*api.MaxRecorded || len(slices.Compact(slices.Clone(ids))) != len(ids) {
		t.Errorf("%d are listed", len(ids))
	}
	if list := ask(api.RecordedRequest{}); len(list.Requests) != usualRecorded || !list.More {
		t.Errorf("%d without a limit", len(list.Requests))
	}
	one := ask(api.RecordedRequest{ID: ids[1]}).Requests
	if node, err := RecordedNode(ids[1]); err != nil || len(one) != 1 || one[0].Node != node ||
		one[0].Decision != outcomeLoad || one[0].Worker != "w" || one[0].RequestID != "r" || one[0].Selected != 1 {
		t.Fatalf("%+v of %s", one, ids[1])
	}
	hasher, err := events.NewHasher(16, events.Space{Salt: "s"})
	if err != nil {
		t.Fatal(err)
	}
	tokens := make([]uint32, 40)
	tokens[0] = 199
	if want := fmt.Sprint(hasher.Hash(nil, tokens)); fmt.Sprint(one[0].Hashes) != want {
		t.Errorf("hashes %v, want %s", one[0].Hashes, want)
	}
	if gone := ask(api.RecordedRequest{ID: recordedID{1, "a"}.String()}).Requests; len(gone) > 0 {
		t.Errorf("%+v", gone)
	}
	if _, err := nodes[0].Recorded(ctx, &api.RecordedRequest{Model: "m", Before: "yesterday"}); err == nil {
		t.Error("an invalid id is accepted")
	}
	ended, end := context.WithCancel(ctx)
	end()
	if _, err := New(Config{}).Recorded(ended, &api.RecordedRequest{Model: "m"}); err == nil {
		t.Error("Recorded does not end with its context")
	}

	// The blocks are bounded for all kinds of requests.
	s := &recent{}
	for i := range 300 {
		s.add(api.Recorded{ID: fmt.Sprint(i)}, make([]events.LocalHash, i*i))
		kept := 0
		for _, r := range s.list {
			kept += len(r.hashes)
		}
		if kept != s.blocks || kept > maxRecentBlocks || len(s.list) > api.MaxRecorded || len(s.list) == 0 {
			t.Fatalf("%d blocks in %d requests", kept, len(s.list))
		}
	}
	if s.list[len(s.list)-1].hashes != nil {
		t.Error("the hashes of a long prompt are stored")
	}
}

// TestRecordedOfTheLastHour: at a hundred requests a second, the last requests and some of each earlier time are kept.
// Requests older than an hour are deleted.
func TestRecordedOfTheLastHour(t *testing.T) {
	s, at := &recent{}, time.Unix(1_800_000_000, 0)
	add := func() {
		at = at.Add(10 * time.Millisecond)
		s.add(api.Recorded{At: at}, nil)
	}
	for range 20 * 60 * 100 {
		add()
	}
	within := func(from, to time.Duration) (n int) {
		for _, r := range s.list {
			if age := at.Sub(r.At); age >= from && age < to {
				n++
			}
		}
		return n
	}
	if n := within(0, newestKept*10*time.Millisecond); n != newestKept {
		t.Errorf("%d of the newest %d are kept", n, newestKept)
	}
	for _, d := range [][2]time.Duration{{time.Second, 10 * time.Second}, {10 * time.Second, time.Minute},
		{time.Minute, 5 * time.Minute}, {5 * time.Minute, 20 * time.Minute}} {
		if n := within(d[0], d[1]); n < 10 {
			t.Errorf("%d from %v to %v ago are kept", n, d[0], d[1])
		}
	}
	if !slices.IsSortedFunc(s.list, func(a, b kept) int { return a.At.Compare(b.At) }) || len(s.list) != api.MaxRecorded {
		t.Errorf("%d are kept, or not in order", len(s.list))
	}
	at = at.Add(recentFor)
	if add(); len(s.list) != 1 {
		t.Errorf("%d are kept an hour later", len(s.list))
	}
}

package load

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// foreignNow formats a table of foreign requests as text: the tokens, blocks and requests of each rank with requests.
func foreignNow(f *foreign, now time.Duration, model Model) string {
	var rows []string
	f.read(now, model, func(t *Table) {
		for _, l := range t.Rows() {
			if l.Requests > 0 {
				rows = append(rows, fmt.Sprintf("%s: %d tokens, %d blocks, %d requests", l.Rank, l.PrefillTokens, l.Blocks,
					l.Requests))
			}
		}
	})
	return strings.Join(rows, "; ")
}

// TestForeignRequests follows requests from beginning to end, in the message formats of all router releases.
func TestForeignRequests(t *testing.T) {
	m, f := Model{Name: "m"}, newForeign(Limits{Requests: 3, Expiry: time.Minute}, 1)
	a, b := events.RankKey{Instance: "a"}, events.RankKey{Instance: "b", Rank: 1}
	now := time.Duration(0)
	step := func(want string, owned bool, changes ...events.RouterRequest) {
		t.Helper()
		for i := range changes {
			f.apply(now, m, &changes[i], owned)
		}
		if got := foreignNow(f, now, m); got != want {
			t.Errorf("after %+v: %q, want %q", changes, got, want)
		}
		for _, table := range f.tables {
			if err := table.Check(); err != nil {
				t.Error(err)
			}
		}
	}
	add := func(id string, at events.RankKey, tokens uint64, blocks ...events.SeqHash) events.RouterRequest {
		return events.RouterRequest{Key: at, ID: id, Change: events.RequestAdded, Blocks: blocks, PrefillTokens: tokens}
	}
	is := func(id string, at events.RankKey, change events.RequestChange) events.RouterRequest {
		return events.RouterRequest{Key: at, ID: id, Change: change}
	}
	prefill := func(id string, at events.RankKey, tokens uint64) events.RouterRequest {
		return events.RouterRequest{Key: at, ID: id, Change: events.RequestPrefilling, PrefillTokens: tokens}
	}
	step("", false, is("r", a, events.RequestFreed))
	step("a/0: 9 tokens, 2 blocks, 1 requests", false, add("r", a, 9, 1, 2), add("r", a, 7, 1))
	step("a/0: 9 tokens, 2 blocks, 1 requests", false, is("r", b, events.RequestFreed), prefill("r", a, 5))
	step("a/0: 9 tokens, 2 blocks, 1 requests; b/1: 4 tokens, 1 blocks, 1 requests", false, add("r", b, 4, 1))
	step("a/0: 0 tokens, 2 blocks, 1 requests; b/1: 4 tokens, 1 blocks, 1 requests", false,
		is("r", a, events.RequestPrefilled))
	step("b/1: 4 tokens, 1 blocks, 1 requests", false, is("r", a, events.RequestFreed))
	step("", false, is("r", b, events.RequestFreed), is("r", b, events.RequestFreed), is("r", b, events.RequestPrefilled))

	// Old releases publish the tokens separately.
	step("a/0: 5 tokens, 1 blocks, 2 requests", false, add("s", a, 0, 3), prefill("s", a, 8), prefill("s", a, 5))
	step("a/0: 0 tokens, 1 blocks, 1 requests", false, is("s", a, events.RequestPrefilled))
	step("", false, is("s", a, events.RequestFreed))
	step("a/0: 8 tokens, 0 blocks, 1 requests", false, prefill("s", a, 8))
	step("a/0: 6 tokens, 1 blocks, 1 requests", false, add("s", a, 6, 3))
	step("", false, is("s", a, events.RequestFreed))

	// Requests booked by this service do not count as foreign. The booking may come before or after.
	step("", true, add("o", a, 9, 1))
	step("a/0: 9 tokens, 1 blocks, 1 requests", false, add("p", a, 9, 1))
	f.removeBooked(now, m, "p")
	step("", false)

	// Limits, and requests that are never freed.
	step("a/0: 0 tokens, 3 blocks, 3 requests", false, add("1", a, 0, 1), add("2", a, 0, 2), add("3", a, 0, 3),
		add("4", a, 0, 4), add(strings.Repeat("x", 2000), b, 0), is("1", a, "later"))
	now = 59 * time.Second
	step("a/0: 0 tokens, 3 blocks, 3 requests", false)
	now = time.Minute
	step("", false)
	step("a/0: 1 tokens, 0 blocks, 1 requests", false, add("g", a, 1))
	f.removeRank(now, a)
	step("", false)
	other := add("q", a, 1)
	f.apply(now, Model{Name: "n"}, &other, false) // in place of the empty table
	if got := foreignNow(f, now, Model{Name: "n"}); got != "a/0: 1 tokens, 0 blocks, 1 requests" {
		t.Error(got)
	}
	f.apply(now, m, &other, false) // all tables have requests
	want := ForeignCounts{Requests: 1, Added: 13, Prefilled: 2, Freed: 4, Own: 2, Duplicate: 2, Unknown: 4, Refused: 4,
		Expired: 3}
	if got := f.status(now); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// TestForeignRequestsTwin applies random changes and compares each rank's load with a map of requests.
func TestForeignRequestsTwin(t *testing.T) {
	for seed := range uint64(testkit.Rounds(20)) {
		rng := rand.New(rand.NewPCG(seed, 5))
		m, f := Model{Name: "m"}, newForeign(Limits{}, 4)
		type request struct {
			tokens uint64
			blocks []events.SeqHash
		}
		twin := map[events.RankKey]map[string]request{}
		for range 500 {
			key := events.RankKey{Instance: events.WorkerID([]string{"a", "b", "c"}[rng.IntN(3)])}
			id := fmt.Sprint(rng.IntN(8))
			if twin[key] == nil {
				twin[key] = map[string]request{}
			}
			was, known := twin[key][id]
			change := events.RouterRequest{Key: key, ID: id}
			switch rng.IntN(3) {
			case 0:
				change.Change, change.PrefillTokens = events.RequestAdded, uint64(rng.IntN(100))
				for range rng.IntN(4) {
					change.Blocks = append(change.Blocks, events.SeqHash(rng.IntN(6)<<8|len(change.Blocks)))
				}
				if !known {
					twin[key][id] = request{change.PrefillTokens, change.Blocks}
				}
			case 1:
				change.Change = events.RequestPrefilled
				if known {
					twin[key][id] = request{0, was.blocks}
				}
			default:
				change.Change = events.RequestFreed
				delete(twin[key], id)
			}
			f.apply(0, m, &change, false)
			total := 0
			for key, requests := range twin {
				tokens, paths := uint64(0), map[string]bool{}
				for _, r := range requests {
					tokens += r.tokens
					for i := range r.blocks {
						paths[fmt.Sprint(r.blocks[:i+1])] = true
					}
				}
				total += len(requests)
				var got Load
				f.read(0, m, func(t *Table) {
					for _, l := range t.Rows() {
						if l.Rank == key {
							got = l
						}
					}
				})
				if uint64(got.PrefillTokens) != tokens || int(got.Blocks) != len(paths) || int(got.Requests) != len(requests) {
					t.Fatalf("seed %d, after %+v: %+v, want %d tokens, %d blocks, %d requests", seed, change, got, tokens,
						len(paths), len(requests))
				}
			}
			if got := f.status(0).Requests; got != total {
				t.Fatalf("seed %d: %d requests, want %d", seed, got, total)
			}
		}
	}
}

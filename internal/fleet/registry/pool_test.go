package registry

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestPoolsAreMadeFromThoseBefore changes workers and operators' records: updated pools equal pools that are built from
// nothing.
func TestPoolsAreMadeFromThoseBefore(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 5))
	r := New(Config{Namespace: &jetstream.Namespace{}})
	r.apply(jetstream.Watched{Anew: true})
	r.apply(jetstream.Watched{Current: true})
	models := []string{"a", "b"}
	there, made := 0, 0
	for revision := range uint64(3000) {
		instance := events.WorkerID(fmt.Sprint("w", rng.IntN(300)))
		e := jetstream.Entry{Revision: revision + 1, Deleted: rng.IntN(3) == 0}
		var err error
		if rng.IntN(4) > 0 {
			it := record(string(instance), DefaultLease)
			it.Rank, it.Model = events.Rank(rng.IntN(2)), models[rng.IntN(len(models))]
			it.Worker = &api.WorkerSpec{Endpoint: fmt.Sprint("http://host:", 1+rng.IntN(5)), RankSize: 2}
			if e.Key, err = jetstream.WorkerKey(0, it.Key()); err != nil {
				t.Fatal(err)
			}
			if e.Value, err = it.encode(); err != nil {
				t.Fatal(err)
			}
		} else {
			o := Operator{Version: operatorVersion, Instance: instance, Drain: &Drain{Since: time.Unix(0, 0)}}
			if e.Key, err = jetstream.OperatorKey(instance); err != nil {
				t.Fatal(err)
			}
			if e.Value, err = json.Marshal(o); err != nil {
				t.Fatal(err)
			}
		}
		r.apply(jetstream.Watched{Entries: []jetstream.Entry{e}})
		if rng.IntN(100) == 0 { // the watch restarts, and omits some
			r.apply(jetstream.Watched{Anew: true})
			r.apply(jetstream.Watched{Entries: []jetstream.Entry{e}, Current: true})
		}
		if rng.IntN(3) == 0 {
			continue
		}
		for _, model := range models {
			if k := r.kept[model]; k != nil && len(k.altered) > 0 {
				made++
			}
			got := r.Pool(model).Ranks
			want := r.ranksWhere(func(_ events.WorkerID, m string) bool { return m == model })
			if len(got)+len(want) > 0 && !reflect.DeepEqual(got, want) {
				t.Fatalf("after %d changes, the last of %s, the pool of %s is\n%+v\nwant\n%+v", revision+1, e.Key, model, got,
					want)
			}
			there += len(got)
		}
	}
	if there == 0 || made < 1000 {
		t.Errorf("%d ranks in all, %d updated pools", there, made)
	}
}

// BenchmarkPoolOfMany processes a change of one of 100,000 workers, and rebuilds the pool.
func BenchmarkPoolOfMany(b *testing.B) {
	r, entries := large(b, 100_000)
	revision := uint64(len(entries))
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		it := r.workers[r.Pool("m").Ranks[i%len(entries)].RankKey].Record
		it.Worker = &api.WorkerSpec{Endpoint: fmt.Sprint("http://host:", 1+i%5)}
		data, err := it.encode()
		if err != nil {
			b.Fatal(err)
		}
		key, err := jetstream.WorkerKey(0, it.Key())
		if err != nil {
			b.Fatal(err)
		}
		revision++
		r.apply(jetstream.Watched{Entries: []jetstream.Entry{{Key: key, Value: data, Revision: revision}}})
		r.Pool("m")
	}
}

package snapshot_test

import (
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

// printer is a Sink that prints the image.
type printer struct{ ranks []snapshot.RankState }

func (p printer) Run(r *events.Run) error {
	for _, h := range r.Holdings {
		key := p.ranks[h.Rank].Key()
		fmt.Printf("%s holds the first %d of %d blocks of run %d in %s\n", key, h.Lead, len(r.Locals), r.ID, h.Tier)
	}
	return nil
}

func (p printer) Rank(i int, img *events.RankImage) error {
	key := p.ranks[i].Key()
	fmt.Printf("%s has %d tombstones\n", key, len(img.Tombstones))
	return nil
}

// Example writes a snapshot of partition 3 to a bucket and restores it.
func Example() {
	values := map[string][]byte{} // simulates the bucket
	epoch := time.Date(2026, 11, 21, 8, 0, 0, 0, time.UTC)
	log := snapshot.Log{Namespace: "prod", Stream: "KV_EVENTS_prod_3", Epoch: epoch, First: 1, Last: 1234}

	// Write. The bucket is empty; the index is at sequence 1234.
	plan, err := snapshot.PlanWrite(snapshot.Bucket{Partition: 3}, log, 1234)
	check(err)
	w, err := snapshot.NewWriter(snapshot.Config{
		Namespace: "prod", Stream: log.Stream, Epoch: epoch, Seq: 1234, Created: epoch.Add(time.Hour), Writer: "node-1",
		Spaces: []snapshot.Space{{Space: 1, Model: "llama", BlockSize: 16}},
		Ranks:  []snapshot.RankState{{Instance: "worker-1", Model: "llama", BlockSize: 16, LastID: 77}},
	}, plan, nil, func(key string, data []byte) error { values[key] = data; return nil })
	check(err)
	check(w.Run(&events.Run{
		ID: 1, Space: 1, Parent: events.NoRun,
		Locals: []events.LocalHash{11, 12, 13}, Names: []events.BlockHash{21, 22, 0},
		Holdings: []events.Holding{{Rank: 0, Tier: events.Device, Lead: 2}},
	}))
	check(w.Rank(0, &events.RankImage{Tombstones: []events.Tombstone{{Name: 23, Run: 1, Block: 2}}}))
	m, _, err := w.Close()
	check(err)
	manifest, err := m.Encode()
	check(err)
	values[snapshot.ManifestKey(3)] = manifest // by compare-and-set, after the chunks
	fmt.Println("log may be purged up to", plan.After(m, nil).PurgeTo)

	// Restore.
	bucket := snapshot.Bucket{Partition: 3,
		Manifests: map[string][]byte{snapshot.ManifestKey(3): values[snapshot.ManifestKey(3)]}}
	for _, m := range snapshot.Choose(bucket, log).Usable {
		_, err := snapshot.Read(m, func(key string) ([]byte, error) {
			if data, ok := values[key]; ok {
				return data, nil
			}
			return nil, snapshot.ErrMissing
		}, func(ranks []snapshot.RankState) (snapshot.Sink, error) { return printer{ranks}, nil })
		check(err)
		fmt.Println("go on from", m.Seq+1)
	}
	// Output:
	// log may be purged up to 0
	// worker-1/0 holds the first 2 of 3 blocks of run 1 in device
	// worker-1/0 has 1 tombstones
	// go on from 1235
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

package registry

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// large returns a registry with n workers, and the entry of each.
func large(b *testing.B, n int) (*Registry, []jetstream.Entry) {
	r := New(Config{})
	entries := make([]jetstream.Entry, n)
	for i := range entries {
		record := record(fmt.Sprintf("vllm-decode-%05d", i), DefaultLease)
		record.Source, record.L3 = "vllm", &hicache.Config{SGLang: &hicache.SGLang{Backend: "mooncake", PageSize: 64,
			TPSize: 8}}
		record.Holder = Holder{ID: "ZXCVBNMASDFGHJKLQWERTYUIOP", Host: fmt.Sprint("gpu-", i), PID: 4711,
			Since: time.Unix(1e9, 0).UTC()}
		data, err := record.encode()
		if err != nil {
			b.Fatal(err)
		}
		key, err := jetstream.WorkerKey(events.Partition(i%64), record.Key())
		if err != nil {
			b.Fatal(err)
		}
		entries[i] = jetstream.Entry{Key: key, Value: data, Revision: uint64(i + 1)}
	}
	r.apply(jetstream.Watched{Anew: true})
	r.apply(jetstream.Watched{Entries: entries, Current: true})
	return r, entries
}

// BenchmarkRenewal processes a renewal of one of 10,000 leases.
func BenchmarkRenewal(b *testing.B) {
	r, entries := large(b, 10_000)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		e := entries[i%len(entries)]
		e.Revision += uint64(10_000 * (1 + i/len(entries)))
		r.apply(jetstream.Watched{Entries: []jetstream.Entry{e}})
	}
}

// BenchmarkGone removes and adds one of 10,000 workers.
func BenchmarkGone(b *testing.B) {
	m := NewMachine()
	records := make([]Record, 10_000)
	for i := range records {
		records[i] = record(fmt.Sprintf("vllm-decode-%05d", i), DefaultLease)
		m.Seen(records[i], uint64(i+1), 0)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		r := records[i%len(records)]
		m.Gone(r.Key())
		m.Seen(r, uint64(i+1), 0)
	}
}

// BenchmarkDue checks 10,000 leases without a due lease, as eight times per lease.
func BenchmarkDue(b *testing.B) {
	m := NewMachine()
	m.Anew()
	m.Current()
	for i := range 10_000 {
		m.Seen(record(fmt.Sprintf("vllm-decode-%05d", i), DefaultLease), uint64(i+1), 0)
	}
	m.Probed(0)
	b.ReportAllocs()
	for b.Loop() {
		m.Due(0, all)
	}
}

package doctor

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// streamFault is a fault of one or more streams. All partitions with the same fault in their logs share a finding.
type streamFault struct {
	Finding
	names   []string    // names of the streams
	buckets []string    // names of the buckets among the streams
	logs    cluster.Set // partitions of the logs among the streams
}

// streamFaults collects faults of streams. The zero value is empty.
type streamFaults []*streamFault

// add adds a fault of a stream. Faults with the same text, apart from the evidence, are combined. The remedy contains
// NAME in place of the stream's name.
func (l *streamFaults) add(s *jetstream.StreamState, f Finding) {
	i := slices.IndexFunc(*l, func(known *streamFault) bool {
		return known.ID == f.ID && known.What == f.What && known.Remedy == f.Remedy
	})
	if i < 0 {
		i = len(*l)
		*l = append(*l, &streamFault{Finding: f})
	}
	at := (*l)[i]
	at.names = append(at.names, s.Name)
	if s.Bucket != "" {
		at.buckets = append(at.buckets, "bucket "+s.Bucket)
	} else {
		at.logs.Add(s.Partition)
	}
}

// findings returns the faults with their places.
func (l streamFaults) findings() (list []Finding) {
	for _, f := range l {
		places := f.buckets
		switch f.logs.Len() {
		case 0:
		case 1:
			places = append(places, f.names[0]) // logs come before buckets
		default:
			places = append(places, "the logs of "+f.logs.Phrase())
		}
		f.Where = strings.Join(places, ", ")
		name := escape.Shell(strings.TrimPrefix(f.names[0], "KV_"))
		if f.logs.Len() > 0 {
			name = escape.Shell(f.names[0])
		}
		if len(f.names) > 1 {
			f.Evidence += " (of " + f.names[0] + ")"
			name += ", and each of the others (" + registry.First(f.names[1:]) + ")"
		}
		f.Remedy = strings.ReplaceAll(f.Remedy, "NAME", name)
		list = append(list, f.Finding)
	}
	return list
}

func judgeStreams(f *Facts) []Finding {
	var faults streamFaults
	for i := range f.Streams {
		s := &f.Streams[i]
		found := func(id Fault, severity Severity, what, evidence, remedy string) {
			faults.add(s, finding(severity, id, "", what, evidence, remedy))
		}
		kind := "the log of a partition"
		if s.Bucket != "" {
			kind = "the bucket of " + s.Usage
		}
		switch {
		case errors.Is(s.Err, jetstream.ErrNotFound):
			found(streamMissing, Error, kind+" is missing", s.Err.Error(),
				"check that an indexer serves the namespace: the indexer creates the stream within seconds")
			continue
		case s.Err != nil:
			found(streamLeaderless, Error, "streams do not answer: they have no leader", s.Err.Error(),
				"start the missing NATS servers: more than half of the servers with replicas of a stream must be up")
			continue
		}
		if len(s.Odd) > 0 {
			remedy := "stop the indexers, delete the stream with nats stream rm NAME, and start the indexers: " +
				"they recreate the stream, and shims " +
				"publish the engines' blocks again"
			if s.Bucket != "" {
				remedy = "stop the indexers, delete the bucket with nats kv del NAME, and start the indexers: " +
					"they recreate the bucket"
			}
			found(streamChanged, Error, kind+" has changed settings: events could be lost without notice",
				strings.Join(s.Odd, "; "), remedy)
		}
		if s.Refused != nil && errors.Is(s.Refused, jetstream.ErrFull) {
			found(streamUnwritable, Error, "streams reject writes", s.Refused.Error(),
				"make room on the disk of NATS server "+s.Server+", then restart that server: it rejects writes until then")
		}
		if !s.Direct {
			found(streamNoDirect, Warning, kind+" does not allow direct gets", "allow_direct is off",
				"restart an indexer: it enables direct gets")
		}
		if s.Rollups {
			found(streamRollups, Warning, kind+" allows rollups: a message on one key can remove all other keys",
				"allow_rollup_hdrs is on", "restart an indexer: it disables rollups")
		}
		if !s.Batches && f.Account.Level >= jetstream.BatchLevel {
			found(streamNoBatches, Warning, kind+" accepts no atomic batches",
				"allow_atomic is off, although the server supports it",
				"restart an indexer: it enables batches")
		}
		if len(s.Behind) > 0 {
			found(streamBehind, Warning, "replicas of streams are missing or behind", strings.Join(s.Behind, ", "),
				"start the NATS servers, or wait until the replicas have caught up: another loss could stop the log")
		}
		if s.Bucket != "" && s.MaxBytes > 0 && float64(s.Bytes) >= nearlyAll*float64(s.MaxBytes) {
			found(bucketFull, Error, kind+" is full", fmt.Sprintf("%d of %d bytes", s.Bytes, s.MaxBytes),
				"raise --snapshot-bytes of the indexers")
		}
	}
	list := faults.findings()
	if servers := oddReplicas(f.Streams); servers != "" {
		list = append(list, finding(Warning, streamReplicas, f.Namespace, "streams have different numbers of replicas",
			servers, "start an indexer with --nats-replicas N: it sets the number for all streams"))
	}
	return list
}

// oddReplicas describes the numbers of replicas of the streams, if they differ.
func oddReplicas(streams []jetstream.StreamState) string {
	counts := map[int]int{}
	for i := range streams {
		if streams[i].Err == nil {
			counts[streams[i].Replicas]++
		}
	}
	if len(counts) < 2 {
		return ""
	}
	var parts []string
	for _, n := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s with %d", plural(counts[n], "stream"), n))
	}
	return strings.Join(parts, ", ")
}

package doctor

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/escape"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// What is too much.
const (
	farAway   = 50 * time.Millisecond // to NATS and back
	clockOff  = 2 * time.Second       // a clock that differs by more is found; by twice a usual lease's beat
	clockBad  = 30 * time.Second      // longer than a usual lease
	nearlyAll = 0.9                   // of a limit
	buckets   = 4                     // of a namespace
)

const natsFlag = "give --nats (or NATS_URL) the address of the NATS servers"

func judgeNATS(f *Facts) (list []Finding) {
	if err := f.ConnectError; err != nil {
		found := Finding{Error, "", natsUnreachable, f.Shown, "NATS is not reached", err.Error(),
			"start `indexer serve --data DIR`, or nats-server -js, there; or " + natsFlag}
		if errors.Is(err, jetstream.ErrDenied) {
			found.ID, found.What, found.Remedy = natsRefused, "NATS refuses this user",
				"give --nats-creds, --nats-nkey, or --nats-user with NATS_PASSWORD; "+
					"indexer auth example prints what each user needs"
		}
		return []Finding{found}
	}
	s := &f.Server
	if s.MaxPayload < jetstream.MessageRoom {
		list = append(list, Finding{Error, "", natsPayload, s.Name, "messages have no room for an indexer's snapshots",
			fmt.Sprintf("max_payload is %d bytes, an indexer needs %d", s.MaxPayload, jetstream.MessageRoom),
			fmt.Sprintf("set max_payload: %d or more in the configuration of each NATS server "+
				"(1048576 is its default), and reload", jetstream.MessageRoom)})
	}
	if s.RoundTrip > farAway {
		list = append(list, Finding{Warning, "", natsFar, s.Name, "NATS is far away from this host",
			fmt.Sprintf("a round trip takes %v", s.RoundTrip.Round(time.Millisecond)),
			"if indexers and shims are as far: " + natsFlag + " in their own site; each event and each answer over NATS " +
				"waits that long"})
	}
	return list
}

func judgeJetStream(f *Facts) (list []Finding) {
	where := f.Server.Name
	switch err := f.AccountError; {
	case errors.Is(err, jetstream.ErrNoJetStream):
		return []Finding{{Error, "", jetStreamOff, where, "there is no JetStream for this account", err.Error(),
			"start nats-server with -js (or jetstream {} in its configuration), and say jetstream: enabled in the account"}}
	case err != nil:
		return []Finding{{Error, "", jetStreamDown, where, "JetStream does not answer", err.Error(),
			"start the NATS servers that are away: more than half of those with JetStream must be up"}}
	}
	a := &f.Account
	if a.Level < jetstream.BatchLevel {
		list = append(list, Finding{Warning, "", jetStreamOld, where, "NATS has no atomic batches",
			fmt.Sprintf("nats-server %s has API level %d, batches begin with %d", f.Server.Version, a.Level,
				jetstream.BatchLevel),
			"run nats-server 2.12 or later on all servers, then restart shims and indexers: " +
				"events are published one by one till then"})
	}
	if a.MaxStorage > 0 && float64(a.Storage) >= nearlyAll*float64(a.MaxStorage) {
		severity := Warning
		if a.Storage >= a.MaxStorage {
			severity = Error
		}
		list = append(list, Finding{severity, "", jetStreamStorage, where, "the account's storage is nearly used up",
			fmt.Sprintf("%d of %d bytes", a.Storage, a.MaxStorage),
			"raise max_file of the account (of the server in an indexer: --store-bytes), or keep less: --log-bytes"})
	}
	return list
}

func judgeNamespace(f *Facts) (list []Finding) {
	record, lost := errors.AsType[*jetstream.RecordError](f.OpenError)
	switch err := f.OpenError; {
	case lost:
		return []Finding{{Error, "", namespaceRecord, f.Namespace, "the namespace's record is missing or unreadable",
			record.Error(), "start one indexer with --restore-namespace: it derives the record from the log's streams"}}
	case errors.Is(err, jetstream.ErrNoNamespace):
		return []Finding{{Error, "", namespaceMissing, f.Namespace, "no indexer has made the namespace", err.Error(),
			"start indexer serve --namespace " + escape.Shell(f.Namespace) + ", or give the right one with --namespace"}}
	case err != nil:
		return []Finding{{Error, "", namespaceVersion, f.Namespace, "the namespace's record is not for this version",
			err.Error(), "use the indexer of the version that runs there"}}
	}
	if need := int(f.Partitions) + buckets; f.Account.MaxStreams > 0 && f.Account.MaxStreams < need {
		list = append(list, Finding{Error, "", namespaceStreams, f.Namespace, "the account has no room for all streams",
			fmt.Sprintf("max_streams is %d, %d partitions and %d buckets need %d", f.Account.MaxStreams, f.Partitions,
				buckets, need),
			fmt.Sprintf("set max_streams: %d or more for the account, or -1", need)})
	}
	return list
}

func judgeStreams(f *Facts) (list []Finding) {
	for i := range f.Streams {
		s := &f.Streams[i]
		found := func(id Fault, severity Severity, what, evidence, remedy string) {
			list = append(list, Finding{severity, "", id, s.Name, what, evidence, remedy})
		}
		kind := "the log of a partition"
		if s.Bucket != "" {
			kind = "the bucket of " + s.Usage
		}
		if s.Err != nil {
			found(streamMissing, Error, kind+" is missing", s.Err.Error(),
				"see that an indexer serves this namespace: it makes what is missing within seconds")
			continue
		}
		if len(s.Odd) > 0 {
			remedy := "stop the indexers, delete it with nats stream rm " + escape.Shell(s.Name) + ", start them: they make " +
				"it anew, and shims repeat what engines hold"
			if s.Bucket != "" {
				remedy = "stop the indexers, delete it with nats kv del " + escape.Shell(s.Bucket) + ", and start them: " +
					"they make it anew"
			}
			found(streamChanged, Error, "somebody has changed "+kind+": events could be lost unseen",
				strings.Join(s.Odd, "; "), remedy)
		}
		if s.Refused != nil && errors.Is(s.Refused, jetstream.ErrFull) {
			found(streamUnwritable, Error, kind+" takes no writes", s.Refused.Error(),
				"make room on the disk of NATS server "+s.Server+", then restart that server: it takes nothing more until then")
		}
		if !s.Direct {
			found(streamNoDirect, Warning, kind+" allows no direct gets", "allow_direct is off",
				"restart an indexer: it turns that on")
		}
		if s.Rollups {
			found(streamRollups, Warning, kind+" allows rollups: a message on one key can remove all others",
				"allow_rollup_hdrs is on", "restart an indexer: it turns that off")
		}
		if !s.Batches && f.Account.Level >= jetstream.BatchLevel {
			found(streamNoBatches, Warning, kind+" takes no atomic batches", "allow_atomic is off, and the server has them",
				"restart an indexer: it turns that on")
		}
		if len(s.Behind) > 0 {
			found(streamBehind, Warning, kind+" has replicas that are away or behind", strings.Join(s.Behind, ", "),
				"start these NATS servers, or wait until they have caught up: another loss could stop the log")
		}
		if s.Bucket != "" && s.MaxBytes > 0 && float64(s.Bytes) >= nearlyAll*float64(s.MaxBytes) {
			found(bucketFull, Error, kind+" is full", fmt.Sprintf("%d of %d bytes", s.Bytes, s.MaxBytes),
				"raise --snapshot-bytes of the indexers")
		}
	}
	if servers := oddReplicas(f.Streams); servers != "" {
		list = append(list, Finding{Warning, "", streamReplicas, f.Namespace, "streams have different numbers of replicas",
			servers, "start an indexer with --replicas N: it gives all streams as many"})
	}
	return list
}

// oddReplicas says how many streams have how many replicas, if that differs.
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
	var said []string
	for _, n := range slices.Sorted(maps.Keys(counts)) {
		said = append(said, fmt.Sprintf("%s with %d", plural(counts[n], "stream"), n))
	}
	return strings.Join(said, ", ")
}

package doctor

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/escape"
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
		found := finding(Error, natsUnreachable, f.Shown, "NATS is not reached", err.Error(),
			"start `indexer serve --data DIR`, or nats-server -js, there; or "+natsFlag)
		if errors.Is(err, jetstream.ErrDenied) {
			found.ID, found.What, found.Remedy = natsRefused, "NATS refuses this user",
				"give --nats-creds, --nats-nkey, or --nats-user with NATS_PASSWORD; "+
					"indexer auth example prints what each user needs"
		}
		return []Finding{found}
	}
	s := &f.Server
	if s.MaxPayload < jetstream.MessageRoom {
		list = append(list, finding(Error, natsPayload, s.Name, "messages have no room for an indexer's snapshots",
			fmt.Sprintf("max_payload is %d bytes, an indexer needs %d", s.MaxPayload, jetstream.MessageRoom),
			fmt.Sprintf("set max_payload: %d or more in the configuration of each NATS server "+
				"(1048576 is its default), and reload", jetstream.MessageRoom)))
	}
	if s.RoundTrip > farAway {
		list = append(list, finding(Warning, natsFar, s.Name, "NATS is far away from this host",
			fmt.Sprintf("a round trip takes %v", s.RoundTrip.Round(time.Millisecond)),
			"if indexers and shims are as far: "+natsFlag+" in their own site; each event and each answer over NATS "+
				"waits that long"))
	}
	return list
}

func judgeJetStream(f *Facts) (list []Finding) {
	where := f.Server.Name
	switch err := f.AccountError; {
	case errors.Is(err, jetstream.ErrNoJetStream):
		return []Finding{finding(Error, jetStreamOff, where, "there is no JetStream for this account", err.Error(),
			"start nats-server with -js (or jetstream {} in its configuration), and say jetstream: enabled in the account")}
	case err != nil:
		return []Finding{finding(Error, jetStreamDown, where, "JetStream does not answer", err.Error(),
			"start the NATS servers that are away: more than half of those with JetStream must be up")}
	}
	a := &f.Account
	if a.Level < jetstream.BatchLevel {
		list = append(list, finding(Warning, jetStreamOld, where, "NATS has no atomic batches",
			fmt.Sprintf("nats-server %s has API level %d, batches begin with %d", f.Server.Version, a.Level,
				jetstream.BatchLevel),
			"run nats-server 2.12 or later on all servers, then restart shims and indexers: "+
				"events are published one by one till then"))
	}
	if a.MaxStorage > 0 && float64(a.Storage) >= nearlyAll*float64(a.MaxStorage) {
		severity := Warning
		if a.Storage >= a.MaxStorage {
			severity = Error
		}
		list = append(list, finding(severity, jetStreamStorage, where, "the account's storage is nearly used up",
			fmt.Sprintf("%d of %d bytes", a.Storage, a.MaxStorage),
			"raise max_file of the account (of the server in an indexer: --store-bytes), or keep less: --log-bytes"))
	}
	return list
}

func judgeNamespace(f *Facts) (list []Finding) {
	record, lost := errors.AsType[*jetstream.RecordError](f.OpenError)
	switch err := f.OpenError; {
	case lost:
		return []Finding{finding(Error, namespaceRecord, f.Namespace, "the namespace's record is missing or unreadable",
			record.Error(), "start one indexer with --restore-namespace: it derives the record from the log's streams")}
	case errors.Is(err, jetstream.ErrNoNamespace):
		return []Finding{finding(Error, namespaceMissing, f.Namespace, "no indexer has made the namespace", err.Error(),
			"start indexer serve --nats "+escape.Shell(f.Shown)+" --namespace "+escape.Shell(f.Namespace)+
				", or give the right one with --namespace")}
	case err != nil:
		return []Finding{finding(Error, namespaceVersion, f.Namespace, "the namespace's record is not for this version",
			err.Error(), "use the indexer of the version that runs there")}
	}
	if need := int(f.Partitions) + buckets; f.Account.MaxStreams > 0 && f.Account.MaxStreams < need {
		list = append(list, finding(Error, namespaceStreams, f.Namespace, "the account has no room for all streams",
			fmt.Sprintf("max_streams is %d, %d partitions and %d buckets need %d", f.Account.MaxStreams, f.Partitions,
				buckets, need),
			fmt.Sprintf("set max_streams: %d or more for the account, or -1", need)))
	}
	return list
}

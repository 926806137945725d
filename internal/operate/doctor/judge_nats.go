package doctor

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Thresholds of the findings.
const (
	farAway   = 50 * time.Millisecond // round trip to NATS
	nearlyAll = 0.9                   // share of a limit
	buckets   = 4                     // per namespace
)

const natsFlag = "give --nats (or NATS_URL) the address of the NATS servers"

func judgeNATS(f *Facts) (list []Finding) {
	if err := f.ConnectError; err != nil {
		found := finding(Error, natsUnreachable, f.Shown, "NATS is unreachable", err.Error(),
			"start `indexer serve --data DIR`, or nats-server -js there; or "+natsFlag)
		if errors.Is(err, jetstream.ErrDenied) {
			found.ID, found.What, found.Remedy = natsRefused, "NATS refuses this user",
				"give --nats-creds, --nats-nkey, or --nats-user with NATS_PASSWORD; "+
					"indexer auth create prints the permissions of each user"
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
		list = append(list, finding(Warning, natsFar, s.Name, "NATS has a long round trip from this host",
			fmt.Sprintf("a round trip takes %v", s.RoundTrip.Round(time.Millisecond)),
			"if the same applies to indexers and shims: "+natsFlag+" in their own site; every event and every answer over NATS "+
				"waits that long"))
	}
	return list
}

func judgeJetStream(f *Facts) (list []Finding) {
	where := f.Server.Name
	switch err := f.AccountError; {
	case errors.Is(err, jetstream.ErrNoJetStream):
		return []Finding{finding(Error, jetStreamOff, where, "the account has no JetStream", err.Error(),
			"start nats-server with -js (or jetstream {} in its configuration), and set jetstream: enabled in the account")}
	case err != nil:
		return []Finding{finding(Error, jetStreamDown, where, "JetStream does not answer", err.Error(),
			"start the missing NATS servers: more than half of those with JetStream must be up")}
	}
	a := &f.Account
	if a.Level < jetstream.BatchLevel {
		list = append(list, finding(Warning, jetStreamOld, where, "NATS has no atomic batches",
			fmt.Sprintf("nats-server %s has API level %d, atomic batches need level %d", f.Server.Version, a.Level,
				jetstream.BatchLevel),
			"run nats-server 2.12 or later on all servers, then restart shims and indexers: "+
				"events are published singly until then"))
	}
	if a.MaxStorage > 0 && float64(a.Storage) >= nearlyAll*float64(a.MaxStorage) {
		severity := Warning
		if a.Storage >= a.MaxStorage {
			severity = Error
		}
		list = append(list, finding(severity, jetStreamStorage, where, "the account's storage is nearly exhausted",
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
		return []Finding{finding(Error, namespaceMissing, f.Namespace, "the namespace does not exist", err.Error(),
			"start indexer serve --nats "+escape.Shell(f.Shown)+" --namespace "+escape.Shell(f.Namespace)+
				", or correct --namespace")}
	case err != nil:
		return []Finding{finding(Error, namespaceVersion, f.Namespace, "the namespace's record has another version",
			err.Error(), "use an indexer of the same version as the running nodes")}
	}
	if need := int(f.Partitions) + buckets; f.Account.MaxStreams > 0 && f.Account.MaxStreams < need {
		list = append(list, finding(Error, namespaceStreams, f.Namespace, "the account's limit on streams is too low",
			fmt.Sprintf("max_streams is %d, %d partitions and %d buckets need %d", f.Account.MaxStreams, f.Partitions,
				buckets, need),
			fmt.Sprintf("set max_streams: %d or more for the account, or -1", need)))
	}
	return list
}

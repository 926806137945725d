package doctor

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// RecordingFacts is the state of the stream of recorded requests.
type RecordingFacts struct {
	jetstream.RecordingInfo
	Err error
	Now time.Time // of the reference clock
}

// recordingNodes calls yield for each node that records requests.
func (f *Facts) recordingNodes(yield func(node string, s *api.RecordingStatus)) {
	for _, n := range f.Nodes.Nodes {
		if n.Status != nil && n.Status.Recording != nil {
			yield(n.Node, n.Status.Recording)
		}
	}
}

func lookAtRecording(ctx context.Context, x *examination) (string, error) {
	nodes := 0
	x.facts.recordingNodes(func(string, *api.RecordingStatus) { nodes++ })
	looked := plural(nodes, "recording node")
	switch {
	case nodes == 0:
		return "", errSkipped{"no node records requests"}
	case x.conn == nil:
		return looked, nil
	}
	r := &RecordingFacts{Now: x.cfg.Now()}
	r.RecordingInfo, r.Err = jetstream.OpenRecording(x.conn, x.cfg.Namespace).Info(ctx)
	if r.Err != nil && !errors.Is(r.Err, jetstream.ErrNotFound) {
		if errors.Is(r.Err, jetstream.ErrDenied) { // the nodes still report their own state
			return looked + "; the user may not read the stream", nil
		}
		return looked, r.Err
	}
	x.facts.Recording = r
	return looked + " and the stream", nil
}

func judgeRecording(f *Facts) (list []Finding) {
	const stream = "the stream of recorded requests"
	add := func(severity Severity, id Fault, where, what, evidence, remedy string) {
		list = append(list, finding(severity, id, where, what, evidence, remedy))
	}
	if r := f.Recording; r != nil {
		where := "KV_RECORD_" + f.Namespace
		age := r.Now.Sub(r.Oldest).Round(time.Second)
		switch {
		case r.Err != nil:
			add(Warning, recordingMissing, where, stream+" is missing", r.Err.Error(),
				"restart an indexer with --record: it creates the stream")
		case len(r.Odd) > 0:
			add(Warning, recordingChanged, where, stream+" has changed settings: records could be lost without notice",
				strings.Join(r.Odd, "; "), "stop the recording indexers, delete the stream with nats stream rm "+where+
					", and start the indexers: they recreate the stream")
		case r.MaxBytes <= 0 || r.MaxAge <= 0:
			add(Warning, recordingUnlimited, where, stream+" has no limit: it could fill the disk",
				fmt.Sprintf("max_bytes %d, max_age %v", r.MaxBytes, r.MaxAge),
				"restart an indexer with --record --record-bytes 1073741824: it sets both limits")
		case r.First > 1 && r.Batches > 0 && float64(r.Bytes) >= recordingFull*float64(r.MaxBytes) &&
			age < time.Duration(nearlyAll*float64(r.MaxAge)):
			add(Warning, recordingShort, where, "records go before their age: the limit of bytes is too small for the traffic",
				fmt.Sprintf("%d of %d bytes, the oldest record is %v old, and the limit of the age is %v", r.Bytes, r.MaxBytes,
					age, r.MaxAge), "restart an indexer with a greater --record-bytes, or a smaller --record-age")
		}
	}
	f.recordingNodes(func(node string, s *api.RecordingStatus) {
		switch where := "node " + node; {
		case s.Failing != "":
			add(Warning, recordingFailing, where, "recorded requests cannot be stored",
				fmt.Sprintf("%s; %d bytes wait, %d records were dropped", s.Failing, s.WaitingBytes, s.Dropped),
				"check that JetStream answers and has room, and that the node's account has the permissions of indexer auth print")
		case s.Dropped > 0:
			add(Warning, recordingDropped, where, "recorded requests were dropped: the recording has a gap",
				fmt.Sprintf("%d of %d records since the node's start", s.Dropped, s.Records+s.Dropped),
				"see the node's log for the reason, such as an outage of JetStream; restart the node for a new count")
		}
	})
	return list
}

// recordingFull is the share of the limit of a stream at the limit: a batch has up to 256 KiB, and a stream at least
// 1 MiB.
const recordingFull = 0.6

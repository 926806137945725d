package node

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/testkit/logtest"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

// logOfTen creates a namespace with one partition and ten messages in its log, and starts the writer of a node. The
// node has applied messages up to a sequence, supposedly of the same log.
func logOfTen(t *testing.T, applied events.StreamSeq, at events.Millis) (context.Context, *Node) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	server, err := natsserver.Start(ctx, natsserver.Options{Dir: t.TempDir()})
	must(err)
	t.Cleanup(server.Stop)
	conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{Server: server, Wait: true})
	must(err)
	t.Cleanup(conn.Close)
	ns, err := jetstream.JoinNamespace(ctx, conn, jetstream.NamespaceConfig{Name: "n", Partitions: 1})
	must(err)
	must(ns.EnsureStreams(ctx, jetstream.LogConfig{}))
	bucket, err := ns.EnsureSnapshots(ctx, jetstream.BucketConfig{})
	must(err)
	pub, err := ns.OpenPublisher(ctx, events.RankKey{Instance: "w"}, jetstream.PublisherOptions{})
	must(err)
	for id := range events.EventID(10) {
		data, err := events.AppendBatch(nil, &events.Batch{
			Incarnation: 1, FirstID: id + 1, Model: "m", BlockSize: 16, Events: []events.Event{{Kind: events.Cleared,
				Reason: events.ReasonEngine}},
		})
		must(err)
		_, err = pub.Publish(ctx, [][]byte{data})
		must(err)
	}
	info, err := ns.StreamInfo(ctx, 0)
	must(err)
	n := New(Config{ID: "n", Namespace: ns, Snapshots: bucket})
	go n.write(ctx, n.shards[0])
	must(n.do(ctx, 0, func(m *Machine) { m.Begin(0, applied, at) }))
	n.put(0, servingAt(info.Epoch))
	return ctx, n
}

// TestNoSnapshotBeyondTheEndOfTheLog: a node has applied more messages than the log has, for example after a server's
// return with an old backup. A snapshot of the node would replace usable snapshots.
func TestNoSnapshotBeyondTheEndOfTheLog(t *testing.T) {
	ctx, n := logOfTen(t, 11, 1)
	if _, err := n.save(ctx, 0); !errors.Is(err, errOtherLog) {
		t.Fatalf("got %v", err)
	}
	if _, err := n.cfg.Snapshots.Latest(ctx, snapshot.ManifestKey(0)); !errors.Is(err, jetstream.ErrNotFound) {
		t.Fatalf("there is a manifest: %v", err)
	}
	n.put(0, &restoring{kept: &kept{}})
	if _, err := n.save(ctx, 0); err == nil {
		t.Fatal("a snapshot was written of a partition that is being restored")
	}
}

// TestSnapshotOfAnotherHistory restores a node after the log was rolled back and grew again. The last message of the
// newest snapshot is in the log with another time. The reader detects the difference, and the node does not load the
// same snapshot again.
func TestSnapshotOfAnotherHistory(t *testing.T) {
	ctx, n := logOfTen(t, 5, 1)
	if _, err := n.save(ctx, 0); err != nil {
		t.Fatal(err)
	}
	ready := make(chan struct{})
	var rejected, unfit atomic.Int32
	again := New(Config{ID: "n", Namespace: n.cfg.Namespace, Snapshots: n.cfg.Snapshots,
		Ready: func() { close(ready) },
		Log: logtest.New(func(l logtest.Line) {
			switch l.Text {
			case "snapshot skipped":
				rejected.Add(1)
			case "the log differs from the applied log; restoring again":
				unfit.Add(1)
			}
		})})
	running, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { again.Run(running); close(done) }()
	defer func() { stop(); <-done }()
	select {
	case <-ready:
	case <-ctx.Done():
		t.Fatalf("not ready; the log was found unfit %d times", unfit.Load())
	}
	if at := again.progress(nil)[0]; at.seq != 10 || rejected.Load() != 1 || unfit.Load() != 1 {
		t.Fatalf("%d is applied, %d snapshots passed over, the log unfit %d times", at.seq, rejected.Load(),
			unfit.Load())
	}
}

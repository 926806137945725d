package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

// twoGenerations returns a site with two snapshots and later messages in the log.
func twoGenerations(t *testing.T) *site {
	w := newSite(t)
	w.start()
	w.startShim()
	for range 2 {
		w.grow(3)
		w.awaitAll()
		w.snapshot()
	}
	w.grow(2)
	w.awaitAll()
	return w
}

// newest returns the current manifest.
func (w *site) newest() *snapshot.Manifest {
	w.Helper()
	entry, err := w.bucket.Latest(w.ctx, snapshot.ManifestKey(0))
	w.must(err)
	m, err := snapshot.ParseManifest(entry.Value)
	w.must(err)
	return m
}

func TestStreamRecreatedUnderALiveNode(t *testing.T) {
	w := twoGenerations(t)
	w.act("the stream is deleted, and made again")
	w.must(w.js.DeleteStream(w.ctx, jetstream.Names("test").Stream(0)))
	w.must(w.ns.EnsureStreams(w.ctx, jetstream.LogConfig{MaxBytes: 16 << 20}))
	// The engine sends no more events: only a request makes its shim repeat its blocks.
	s := w.awaitAfter("resynced")
	w.expect("unfit: epoch changed", "requested: resync needed: epoch changed")
	if s.Resyncs.Asked < minRounds || s.Resyncs.Ended != 1 || s.Snapshots.Rejected["other_epoch"] != 2 {
		t.Errorf("counted %+v, %+v", s.Resyncs, s.Snapshots)
	}
	w.grow(2)
	w.awaitAll()
	w.snapshot()
	w.forget()
	w.act("the node stops")
	w.restart()
	w.awaitAll()
	w.expect("1 ranks, lost \"\"")
	w.expectNot("requested")
	w.compareTranscript("stream-made-anew")
}

func TestStreamDeletedUnderALiveNode(t *testing.T) {
	w := newSite(t)
	w.mend = func(ctx context.Context) error {
		return w.ns.EnsureStreams(ctx, jetstream.LogConfig{MaxBytes: 16 << 20})
	}
	w.start()
	w.startShim()
	w.grow(3)
	w.awaitAll()
	w.act("the stream is deleted")
	w.must(w.js.DeleteStream(w.ctx, jetstream.Names("test").Stream(0)))
	w.awaitAfter("resynced")
	w.expect("unfit: epoch changed")
	w.grow(3)
	w.awaitAll()
	w.compareTranscript("stream-deleted")
}

// TestSnapshotBucketDeletedUnderALiveNode: the node recreates the bucket and writes a snapshot into it immediately,
// even without changes since the last one. It does the same if another node has recreated the bucket.
func TestSnapshotBucketDeletedUnderALiveNode(t *testing.T) {
	for name, mends := range map[string]bool{"the node creates it": true, "another node creates it": false} {
		t.Run(name, func(t *testing.T) {
			w := newSite(t)
			create := func(ctx context.Context) error {
				_, err := w.ns.EnsureSnapshots(ctx, jetstream.BucketConfig{})
				return err
			}
			if mends {
				w.mendBucket = create
			}
			w.start()
			w.startShim()
			w.grow(3)
			w.awaitAll()
			w.snapshot()
			w.must(w.js.DeleteStream(w.ctx, "KV_"+w.bucket.Name()))
			if !mends {
				w.must(create(w.ctx))
			}
			testkit.Eventually(t, "there is a snapshot", func() (bool, string) {
				_, err := w.bucket.Latest(w.ctx, snapshot.ManifestKey(0))
				return err == nil, fmt.Sprintf("%v\n%s", err, w.recorded())
			})
			if logged := strings.Contains(w.recorded(), "snapshot bucket recreated"); logged != mends {
				t.Errorf("events:\n%s", w.recorded())
			}
			w.forget()
			w.restart()
			w.awaitAll()
			w.expect(`1 ranks, lost ""`)
			if s, err := w.node.Status(w.ctx); err != nil || len(s.Problems) > 0 {
				t.Errorf("problems: %q, %v", s.Problems, err)
			}
		})
	}
}

// awaitEvent waits until an event is logged.
func (w *site) awaitEvent(word string) {
	w.Helper()
	testkit.Eventually(w, fmt.Sprintf("an event has %q", word), func() (bool, string) {
		events := w.recorded()
		return strings.Contains(events, word), events
	})
}

// awaitAfter is awaitAll after an event.
func (w *site) awaitAfter(word string) *api.Status {
	w.Helper()
	w.awaitEvent(word)
	return w.awaitAll()
}

func TestLogPurgedPastTheNode(t *testing.T) {
	w := newSite(t)
	w.start()
	w.startShim()
	w.grow(3)
	w.awaitAll()
	w.snapshot()
	w.act("the node stops")
	w.stopNode()
	w.grow(3)
	last := w.awaitLog(2)
	w.purge(last + 1)
	w.start()
	s := w.awaitAfter("resynced")
	w.expect("rejected: log_truncated", fmt.Sprintf(
		"requested: resync needed: the messages of the log before %d are gone, and no snapshot replaces them", last+1))
	if s.Snapshots.Rejected["log_truncated"] != 1 {
		t.Errorf("counted %+v", s.Snapshots)
	}
	w.compareTranscript("log-purged-past-the-node")
}

// awaitLog waits until the log has n messages, and returns the last one's sequence.
func (w *site) awaitLog(n events.StreamSeq) events.StreamSeq {
	w.Helper()
	before, last := w.node.applied(0), events.StreamSeq(0)
	testkit.Eventually(w, "the log grows", func() bool {
		info, err := w.ns.StreamInfo(w.ctx, 0)
		w.must(err)
		last = info.Last
		return last > before
	})
	return last
}

// TestServerRestoredFromAnOlderCopy removes the end of the log under all clients. The shim would detect the loss at its
// next publish; the node's request makes this unnecessary.
func TestServerRestoredFromAnOlderCopy(t *testing.T) {
	w := newSite(t)
	w.start()
	stop := w.startShim()
	w.grow(3)
	w.awaitAll()
	stop()
	w.server.Stop()
	old := t.TempDir()
	w.must(os.CopyFS(old, os.DirFS(w.dir)))
	w.startServer()
	w.startShim()
	w.grow(3)
	w.awaitAll()
	w.grow(1)
	w.awaitAll()

	w.act("the server comes back with a copy of its files from before the last 4 blocks")
	w.server.Stop()
	w.must(os.RemoveAll(w.dir))
	w.must(os.CopyFS(w.dir, os.DirFS(old)))
	w.startServer()
	w.awaitAfter("resynced")
	w.expect("unfit: regressed", "requested: resync needed: regressed")
	w.grow(1)
	w.awaitAll()
	w.compareTranscript("server-restored-from-an-older-copy")
}

func TestCorruptChunkSendsToTheOlderGeneration(t *testing.T) {
	w := twoGenerations(t)
	w.stopNode()
	newest, fresh := w.newest(), "" // fresh: a chunk absent from the older generation
	for _, ref := range newest.Chunks {
		if key, _ := snapshot.ParseKey(ref.Key); key.Generation == newest.Generation {
			fresh = ref.Key
		}
	}
	data, err := w.bucket.Get(w.ctx, fresh)
	w.must(err)
	data = bytes.Clone(data)
	data[len(data)/2] ^= 1
	_, err = w.bucket.Put(w.ctx, fresh, data)
	w.must(err)
	w.forget()
	w.start()
	s := w.awaitAll()
	w.expect("rejected: corrupt_chunk", fresh, fmt.Sprintf("restored at %d, 1 ranks", newest.Previous.Seq))
	w.expectNot("requested")
	if s.Snapshots.Rejected["corrupt_chunk"] != 1 || s.Partitions[0].RestoredFrom != newest.Previous.Seq {
		t.Errorf("counted %+v; %+v", s.Snapshots, s.Partitions[0])
	}

	list, err := Generations(w.ctx, w.ns, true)
	w.must(err)
	if len(list.Generations) != 2 || !list.Generations[0].Bad || list.Generations[1].Bad ||
		!list.Generations[1].Verified ||
		len(list.Generations[0].BadChunks) != 1 || list.Generations[0].BadChunks[0].Key != fresh {
		t.Errorf("verify: %+v", list.Generations)
	}
	w.snapshot() // does not reuse the corrupt chunks
	w.restart()
	w.awaitAll()
	w.allUsable()
}

// allUsable writes two snapshots and fails unless all generations are usable then.
func (w *site) allUsable() {
	w.Helper()
	for range 2 {
		w.grow(1)
		w.awaitAll()
		w.snapshot()
	}
	list, err := Generations(w.ctx, w.ns, true)
	w.must(err)
	if len(list.Generations) != 2 {
		w.Errorf("%d generations: %+v", len(list.Generations), list.Generations)
	}
	for _, g := range list.Generations {
		if g.Bad || g.Unusable != "" {
			w.Errorf("unusable after two snapshots: %+v", g)
		}
	}
}

func TestUnreadableManifest(t *testing.T) {
	w := twoGenerations(t)
	w.stopNode()
	entry, err := w.bucket.Latest(w.ctx, snapshot.ManifestKey(0))
	w.must(err)
	older := w.newest().Previous

	// A valid manifest of a later build.
	before, _, ok := bytes.Cut(entry.Value, []byte("\"checksum\": "))
	if i := bytes.LastIndex(entry.Value, []byte("\"checksum\": ")); ok {
		before = entry.Value[:i]
	}
	future := bytes.Replace(before, []byte(`"format": 1,`), []byte(`"format": 99,`), 1)
	sum := xxh3.Hash128(future)
	future = fmt.Appendf(future, "\"checksum\": \"%016x%016x\"\n}\n", sum.Hi, sum.Lo)
	for _, c := range []struct {
		reason string
		value  []byte
	}{{"unreadable", entry.Value[:len(entry.Value)/2]}, {"future_version", future}} {
		_, err = w.bucket.Put(w.ctx, snapshot.ManifestKey(0), c.value)
		w.must(err)
		w.forget()
		w.start()
		s := w.awaitAll()
		w.expect("rejected: "+c.reason, fmt.Sprintf("restored at %d, 1 ranks", older.Seq))
		if s.Snapshots.Rejected[c.reason] != 1 {
			t.Errorf("%s: counted %+v", c.reason, s.Snapshots)
		}
		list, err := Generations(w.ctx, w.ns, false)
		w.must(err)
		if len(list.Generations) != 2 || list.Generations[0].Unusable != c.reason || !list.Generations[0].Bad ||
			list.Generations[1].Unusable != "" {
			t.Errorf("%s: list: %+v", c.reason, list.Generations)
		}
		w.stopNode()
	}
	w.start()
	w.awaitAll()
	w.allUsable()
}

func TestBothGenerationsGoneAndTheLogTruncated(t *testing.T) {
	w := twoGenerations(t)
	w.stopNode()
	keys, err := w.bucket.Keys(w.ctx, snapshot.KeyPrefix(0))
	w.must(err)
	for _, key := range keys {
		if k, _ := snapshot.ParseKey(key); k.Type != snapshot.ChunkKey {
			_, err := w.bucket.Put(w.ctx, key, []byte("damaged"))
			w.must(err)
		}
	}
	w.grow(1) // a reader of the remaining log sees an incarnation in its middle
	w.awaitLog(1)
	w.forget()
	w.start()
	s := w.awaitAfter("resynced")
	w.expect("rejected: unreadable", "are gone, and no snapshot replaces them")
	testkit.Eventually(t, "there are no problems", func() (bool, string) {
		s = w.awaitAll() // the node's standstill is a problem until its next measurement
		return len(s.Problems) == 0, fmt.Sprintf("%q", s.Problems)
	})
	if s.Snapshots.Rejected["unreadable"] != 2 || s.Resyncs.Answered == 0 {
		t.Errorf("counted %+v, %+v", s.Snapshots, s.Resyncs)
	}
}

// seenInItsMiddle is a site with a log that begins in the middle of a rank's incarnation. Its shim is stopped.
func seenInItsMiddle(t *testing.T) *site {
	w := newSite(t)
	stop := w.startShim()
	w.grow(3)
	w.node = New(Config{Namespace: w.ns, Snapshots: w.bucket})
	w.awaitLog(1)
	w.grow(1)
	w.node.shards[0].machine.parts[0].applied.Store(1)
	last := w.awaitLog(1)
	stop()
	w.purge(last)
	w.start()
	return w
}

// awaitPartial waits until the node reports missing events of the rank.
func (w *site) awaitPartial() {
	w.Helper()
	testkit.Eventually(w, "the node reports the missing events", func() (bool, string) {
		s, err := w.node.Status(w.ctx)
		w.must(err)
		return s.Partitions[0].State == api.PartitionResync && len(s.Problems) == 1 &&
				strings.Contains(s.Problems[0], "resync needed: events of 1 ranks are missing (w1/0)"),
			fmt.Sprintf("status %+v; events:\n%s", s, w.recorded())
	})
}

// TestRankSeenInItsMiddle keeps the mark of a rank with an unseen beginning over a restart, until its shim repeats the
// blocks.
func TestRankSeenInItsMiddle(t *testing.T) {
	w := seenInItsMiddle(t)
	w.awaitEvent("requested: resync needed: events of 1 ranks") // the lost beginning of the log is resolved
	w.awaitPartial()
	w.snapshot()
	w.act("the node stops")
	w.stopNode()
	w.forget()
	w.start()
	w.awaitPartial()
	w.awaitEvent("requested: ")
	w.expect("1 ranks, lost \"\"")
	w.startShim()
	w.awaitAfter("resynced")
	w.compareTranscript("rank-seen-in-its-middle")
}

// TestForgottenByAnOperator ends the wait for a rank with an engine gone for good: the rank is removed, here and after
// a restart. If the engine returns, the rank begins again.
func TestForgottenByAnOperator(t *testing.T) {
	w := seenInItsMiddle(t)
	w.awaitPartial()
	key := events.RankKey{Instance: "w1"}
	if _, err := shim.Forget(w.ctx, w.ns, events.RankKey{Instance: "w1", Rank: 7}, false); !errors.Is(err,
		shim.ErrUnknown) {
		t.Fatalf("an unknown rank: %v", err)
	}
	ranks, err := shim.RanksOf(w.ctx, w.ns, "w1")
	if err != nil || len(ranks) != 1 || ranks[0] != 0 {
		t.Fatalf("ranks %v, %v", ranks, err)
	}
	done, err := shim.Forget(w.ctx, w.ns, key, false)
	if err != nil || done.Incarnation != done.Was.Incarnation+1 || done.Seq == 0 ||
		done.Was.Identity != (shim.Identity{Model: "m", BlockSize: 4}) {
		t.Fatalf("%+v, %v", done, err)
	}
	gone := func() {
		t.Helper()
		testkit.Eventually(t, "the worker is gone", func() (bool, string) {
			s, err := w.node.Status(w.ctx)
			w.must(err)
			list, err := w.node.Workers(w.ctx, api.WorkersRequest{})
			w.must(err)
			return s.Partitions[0].State == api.PartitionServing && len(s.Problems) == 0 && len(list.Workers) == 0,
				fmt.Sprintf("status %+v; workers %+v; events:\n%s", s, list, w.recorded())
		})
	}
	gone()
	w.expect("resynced")
	if again, err := shim.Forget(w.ctx, w.ns, key, false); err != nil || again.Incarnation != 0 ||
		again.Was.Incarnation != done.Incarnation {
		t.Fatalf("the second time: %+v, %v", again, err)
	}
	w.snapshot()
	w.restart()
	gone()

	stop := w.startShim()
	w.awaitAll()
	if _, err := shim.Forget(w.ctx, w.ns, key, false); !errors.Is(err, shim.ErrFenced) ||
		!strings.Contains(err.Error(), "served by process") {
		t.Fatalf("while a shim lives: %v", err)
	}
	if forced, err := shim.Forget(w.ctx, w.ns, key, true); err != nil || forced.Incarnation == 0 {
		t.Fatalf("by force: %+v, %v", forced, err)
	}
	w.grow(1) // the shim detects it at its next publish
	w.awaitAll()
	stop()
}

// TestSnapshotsAreDue: snapshots are written by time and by blocks since the last one, and not without changes.
func TestSnapshotsAreDue(t *testing.T) {
	t.Parallel() // otherwise its cases delay all other tests
	for name, set := range map[string]func(*site){
		"by time": func(w *site) { w.interval = time.Second }, "by blocks": func(w *site) { w.blocks = 7 },
		// 10 blocks are about 300 bytes
		"by room": func(w *site) { w.must(w.ns.EnsureStreams(w.ctx, jetstream.LogConfig{MaxBytes: 1200})) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newSite(t)
			set(w)
			w.start()
			w.startShim()
			written := func(want uint64) {
				t.Helper()
				testkit.Eventually(t, "a snapshot is written", func() (bool, string) {
					s, err := w.node.Status(w.ctx)
					w.must(err)
					return s.Snapshots.Written >= want && s.Partitions[0].SnapshotSeq == s.Partitions[0].Seq &&
						s.Partitions[0].Seq > 0, fmt.Sprintf("%d are written: %+v", s.Snapshots.Written, s.Partitions[0])
				})
			}
			w.grow(10)
			w.awaitAll()
			written(1)
			s, err := w.node.Status(w.ctx)
			w.must(err)
			time.Sleep(3 * saveTick)
			if now, err := w.node.Status(w.ctx); err != nil || now.Snapshots.Written != s.Snapshots.Written {
				t.Fatalf("%d snapshots without a change, %v", now.Snapshots.Written-s.Snapshots.Written, err)
			}
			w.grow(10)
			w.awaitAll()
			written(s.Snapshots.Written + 1)
		})
	}
}

func TestPoison(t *testing.T) {
	w := newSite(t)
	w.start()
	w.startShim()
	w.grow(2)
	w.awaitAll()
	subject, err := jetstream.Names("test").Event(0, events.RankKey{Instance: "w2"})
	w.must(err)
	for _, m := range []struct {
		subject string
		data    string
	}{{subject, "\xc1 no batch"}, {subject, ""}, {strings.Replace(subject, ".w2.", ".w=zz.", 1), "x"}} {
		_, err := w.js.Publish(w.ctx, m.subject, []byte(m.data))
		w.must(err)
	}
	w.grow(2)
	if s := w.awaitAll(); s.Events["poison"] != 3 {
		t.Errorf("counted %v", s.Events)
	}
	// Restores and replays succeed too.
	w.snapshot()
	w.restart()
	w.awaitAll()
}

// TestRoom fills the snapshot bucket: snapshots fail and are counted, the log is not trimmed, and a warning is logged
// at 80 %. The next snapshot succeeds after room was made.
func TestRoom(t *testing.T) {
	w := newSite(t)
	w.start()
	w.startShim()
	w.grow(50)
	w.awaitAll()
	full, err := w.bucket.Usage(w.ctx)
	w.must(err)
	limit := func(bytes int64) {
		t.Helper()
		var err error
		w.bucket, err = w.ns.EnsureSnapshots(w.ctx, jetstream.BucketConfig{MaxBytes: bytes})
		w.must(err)
	}
	limit(full.Bytes + 1000)
	_, err = w.bucket.Put(w.ctx, "filler", make([]byte, 850))
	w.must(err)
	if _, err := w.node.Snapshot(w.ctx); err == nil {
		t.Fatal("there was room")
	}
	var s *api.Status
	problems := ""
	testkit.Eventually(t, "the status reports the full bucket", func() (bool, string) {
		s, err = w.node.Status(w.ctx)
		w.must(err)
		problems = strings.Join(s.Problems, "\n")
		return strings.Contains(problems, "the snapshot bucket is 8") ||
			strings.Contains(problems, "the snapshot bucket is 9"), fmt.Sprintf("%+v", s)
	})
	if !strings.Contains(problems, "the snapshot was not written") || s.Snapshots.Failed != 1 ||
		s.SnapshotBucket.Limit != full.Bytes+1000 {
		t.Fatalf("status %+v", s)
	}
	if info, err := w.ns.StreamInfo(w.ctx, 0); err != nil || info.First != 1 {
		t.Fatalf("the log begins at %d, %v", info.First, err)
	}
	limit(1 << 30)
	w.snapshot()
	if s, err = w.node.Status(w.ctx); err != nil || s.Snapshots.Written != 1 ||
		strings.Contains(strings.Join(s.Problems, ""), "not written") {
		t.Fatalf("status %+v, %v", s, err)
	}
}

// TestChecksums: a restored node, and a node that read only the log, have the same checksum as the previous node at the
// same position.
func TestChecksums(t *testing.T) {
	w := newSite(t)
	w.start()
	w.startShim()
	checksum := func() string {
		t.Helper()
		for {
			s, err := w.node.Verify(w.ctx, nil)
			w.must(err)
			info, err := w.ns.StreamInfo(w.ctx, 0)
			w.must(err)
			d := s.Partitions[0]
			if d.Seq > info.Last || len(d.Checksum) != 16 {
				t.Fatalf("%+v of a log with the end at %d", d, info.Last)
			}
			if d.Seq == info.Last { // otherwise the shim has written meanwhile
				return d.Checksum
			}
		}
	}
	empty := checksum()
	w.grow(20)
	w.awaitAll()
	first := checksum()
	w.stopNode()
	w.must(w.bucketGone())
	w.start()
	w.awaitAll()
	if got := checksum(); got != first || got == empty {
		t.Fatalf("from the log alone %s, before %s, of nothing %s", got, first, empty)
	}
	w.snapshot()
	w.grow(5)
	w.awaitAll()
	second := checksum()
	w.stopNode()
	w.start()
	w.awaitAll()
	if got := checksum(); got != second || got == first {
		t.Fatalf("from a snapshot and the log %s, before %s, earlier %s", got, second, first)
	}

	// The status has the last snapshot after a restart too.
	taken := func() api.PartitionDetail {
		t.Helper()
		s, err := w.node.Status(w.ctx)
		w.must(err)
		return s.Partitions[0]
	}
	w.snapshot()
	before := taken()
	w.stopNode()
	w.start()
	w.awaitAll()
	if now := taken(); !now.SnapshotTime.Equal(before.SnapshotTime) || before.SnapshotTime.IsZero() ||
		now.SnapshotSize != before.SnapshotSize ||
		before.SnapshotSize == 0 || now.SnapshotSeq != before.SnapshotSeq {
		t.Fatalf("after a restart the snapshot has %+v, before %+v", now, before)
	}
}

// bucketGone removes all snapshots.
func (w *site) bucketGone() error {
	s, err := w.js.Stream(w.ctx, "KV_"+w.bucket.Name())
	if err != nil {
		return err
	}
	return s.Purge(w.ctx)
}

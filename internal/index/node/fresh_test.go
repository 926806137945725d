package node

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
)

func TestFreshness(t *testing.T) {
	began := time.Now()
	at := func(s int) time.Time { return began.Add(time.Duration(s) * time.Second) }
	for name, c := range map[string]struct {
		f    freshness
		now  int
		want uint64
	}{
		"nothing is known yet":        {freshness{}, 10, 10_000},
		"read to the end just now":    {freshness{readTo: at(8)}, 10, 0},
		"read to the end a while ago": {freshness{readTo: at(3), writable: at(10)}, 10, 7000},
		"read to the end, and nothing more goes in": {freshness{readTo: at(10), writable: at(4), refused: true}, 10,
			6000},
		"neither":                        {freshness{readTo: at(1), writable: at(4), refused: true}, 10, 9000},
		"no message since the start":     {freshness{readTo: at(10), refused: true}, 10, 10_000},
		"the log accepts messages again": {freshness{readTo: at(10), writable: at(4)}, 10, 0},
	} {
		if got := c.f.age(at(c.now), began); got != c.want {
			t.Errorf("%s: %d ms, want %d", name, got, c.want)
		}
	}
}

// find sends a query and returns the status of its one partition.
func (w *site) find() api.PartitionStatus {
	w.Helper()
	a, err := w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: w.prompt})
	w.must(err)
	if len(a.Partitions) != 1 || !a.Complete {
		w.Fatalf("answered %+v", a)
	}
	return a.Partitions[0]
}

// until repeats a query until the partition's status fulfils is.
func (w *site) until(what string, is func(api.PartitionStatus) bool) api.PartitionStatus {
	w.Helper()
	var s api.PartitionStatus
	testkit.Eventually(w, what, func() (bool, string) {
		s = w.find()
		return is(s), fmt.Sprintf("%+v; events:\n%s", s, w.recorded())
	})
	return s
}

// awaitState waits until the status has the partition in a state.
func (w *site) awaitState(want api.PartitionState) {
	w.Helper()
	testkit.Eventually(w, fmt.Sprintf("the partition is %s", want), func() (bool, string) {
		s, err := w.node.Status(w.ctx)
		w.must(err)
		return s.Partitions[0].State == want, fmt.Sprintf("%s; events:\n%s", s.Partitions[0].State, w.recorded())
	})
}

// problems returns the problems of the status, and the notes.
func (w *site) problems() (problems, notes string) {
	w.Helper()
	s, err := w.node.Status(w.ctx)
	w.must(err)
	return strings.Join(s.Problems, "\n"), strings.Join(w.node.Warnings(), "\n")
}

// TestAnswersGrowOldWithoutNATS: while NATS is down, answers have the age of the last report of the log. After its
// return they are current.
func TestAnswersGrowOldWithoutNATS(t *testing.T) {
	w := newSite(t)
	w.start()
	w.startShim()
	w.grow(3)
	w.awaitAll()
	fresh := func(s api.PartitionStatus) bool { return s.StaleMS == 0 }
	w.until("fresh", fresh)
	w.server.Stop()
	away := time.Now()
	old := w.until("old", func(s api.PartitionStatus) bool { return s.StaleMS > 0 })
	if least := uint64(justNow.Milliseconds()); old.StaleMS < least {
		t.Errorf("the reported age is %d ms; below %d ms an answer is current", old.StaleMS, least)
	}
	older := w.until("older", func(s api.PartitionStatus) bool { return s.StaleMS > old.StaleMS })
	if most := uint64(time.Since(w.node.started).Milliseconds()); older.StaleMS > most {
		t.Errorf("%d ms old, %v after the server went, and %d after the node began", older.StaleMS, time.Since(away),
			most)
	}
	problems, notes := w.problems()
	if !strings.Contains(problems, "the state is") ||
		!strings.Contains(notes, "partition 0: the state is") {
		t.Errorf("problems %q, notes %q", problems, notes)
	}
	if err := w.node.Ready(); err != nil {
		t.Errorf("a node that can answer is not ready: %v", err)
	}
	w.awaitState(api.PartitionUnavailable)
	w.startServer()
	w.awaitState(api.PartitionServing)
	w.until("fresh again", fresh)
	w.grow(2)
	w.awaitAll()
}

// TestAnswersGrowOldWhileTheLogRejectsWrites: a log that rejects writes grows old although it is read to its end.
func TestAnswersGrowOldWhileTheLogRejectsWrites(t *testing.T) {
	w := newSite(t)
	w.room = time.Hour // only the test measures
	w.start()
	w.startShim()
	w.grow(3)
	w.awaitAll()
	measured := func(at time.Time, refused bool) {
		w.node.step(0, func(pt *partition) effects { return pt.measured(at, usage{}, refused, true) })
	}
	measured(time.Now().Add(-time.Minute), false)
	w.until("fresh", func(s api.PartitionStatus) bool { return s.StaleMS == 0 })
	measured(time.Now(), true)
	w.until("old, although the log is read to the end repeatedly",
		func(s api.PartitionStatus) bool { return s.StaleMS > 0 })
	w.node.measureCapacity(w.ctx)
	w.until("fresh again", func(s api.PartitionStatus) bool { return s.StaleMS == 0 })
}

// TestAnswersNameResync: answers list a partition that needs a resync, until its shims have repeated their blocks.
func TestAnswersNameResync(t *testing.T) {
	w := newSite(t)
	w.start()
	stop := w.startShim()
	w.grow(3)
	w.awaitAll()
	if w.find().ResyncNeeded {
		t.Error("resync needed of a whole log")
	}
	stop() // no shim can repeat the lost blocks
	w.node.step(0, func(pt *partition) effects {
		pt.reading().need = pt.newNeed("a test")
		return effects{}
	})
	if s := w.find(); !s.ResyncNeeded {
		t.Errorf("%+v", s)
	}
	if _, notes := w.problems(); !strings.Contains(notes, "partition 0: resync needed") {
		t.Errorf("notes %q", notes)
	}
	w.startShim()
	w.until("resynced", func(s api.PartitionStatus) bool { return !s.ResyncNeeded })
	if _, notes := w.problems(); strings.Contains(notes, "resync needed") {
		t.Errorf("notes %q", notes)
	}
	w.awaitAll()
}

// TestLostMessagesAreReadAgain: messages lost between the log and the index are detected, counted, reported and read
// again, with and without later messages.
func TestLostMessagesAreReadAgain(t *testing.T) {
	t.Parallel() // otherwise its cases delay all other tests
	for name, follows := range map[string]bool{"with later messages": true, "without later messages": false} {
		t.Run(name, func(t *testing.T) {
			w := newSite(t)
			w.start()
			w.startShim()
			w.grow(3)
			w.awaitAll()
			w.lose(func() { w.grow(2) })
			if follows {
				w.grow(2)
			}
			w.awaitAll()
			s, err := w.node.Status(w.ctx)
			w.must(err)
			if s.Rereads != 1 || !strings.Contains(w.recorded(), "reread") {
				t.Errorf("%d times read again; events:\n%s", s.Rereads, w.recorded())
			}
			w.until("mended", func(api.PartitionStatus) bool {
				problems, _ := w.problems()
				return problems == ""
			})
			if s.Resyncs.Asked != 0 {
				t.Error("the shims received a request although the log is complete")
			}
		})
	}
}

// lose removes the first messages for the writer after done.
func (w *site) lose(done func()) {
	w.Helper()
	lost := false
	w.must(w.node.do(w.ctx, 0, func(*Machine) { // the writer is blocked meanwhile
		done()
		for !lost {
			select {
			case x := <-w.node.shards[0].work:
				lost = len(x.messages) > 0
				if x.do != nil {
					x.run(w.node.shards[0].machine)
				}
			case <-w.ctx.Done():
				return
			}
		}
	}))
	if !lost {
		w.Fatal("no messages to lose")
	}
}

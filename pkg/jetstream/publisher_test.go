package jetstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// log reads all messages of partition 0.
func (w *world) log() []Message {
	w.t.Helper()
	last := w.info().Last
	rd := startReader(w.t, w.ns, Position{Epoch: w.info().Epoch, Seq: w.info().First - 1})
	defer rd.r.Stop()
	var all []Message
	for {
		u := rd.next()
		all = append(all, u.Messages...)
		if n, ok := u.Notice.(CaughtUp); ok && n.Seq >= last {
			return all
		}
	}
}

// wantLog checks that the log has exactly the numbers 1 to n.
func (w *world) wantLog(n int) {
	w.t.Helper()
	all := w.log()
	for i, m := range all {
		if string(m.Data) != fmt.Sprint(i+1) {
			w.t.Fatalf("message %d of the log (sequence %d) is %q", i+1, m.Seq, m.Data)
		}
	}
	if len(all) != n {
		w.t.Fatalf("the log has %d messages, want %d", len(all), n)
	}
}

// dedupe reads the log like a reader of events: it skips known numbers, and none may be missing.
func (w *world) dedupe() (last, dropped int) {
	w.t.Helper()
	for _, m := range w.log() {
		var id int
		if _, err := fmt.Sscan(string(m.Data), &id); err != nil {
			w.t.Fatal(err)
		}
		switch {
		case id <= last:
			dropped++
		case id == last+1:
			last = id
		default:
			w.t.Fatalf("sequence %d has %d after %d", m.Seq, id, last)
		}
	}
	return last, dropped
}

// noBatches turns off atomic batches in the stream of partition 0.
func (w *world) noBatches() {
	w.t.Helper()
	a, err := w.c.streamInfo(w.ctx, Names("test").Stream(0))
	if err != nil {
		w.t.Fatal(err)
	}
	a.Config.AllowAtomicPublish = false
	if err := w.c.call(w.ctx, "update", "STREAM.UPDATE."+a.Config.Name, a.Config, nil); err != nil {
		w.t.Fatal(err)
	}
}

// through opens the namespace on a connection through a proxy.
func (w *world) through(p *proxy, attempt time.Duration) *Namespace {
	w.t.Helper()
	ns, err := OpenNamespace(w.ctx, connect(w.t, ConnOptions{URLs: []string{p.url()}, AttemptTimeout: attempt}), "test")
	if err != nil {
		w.t.Fatal(err)
	}
	return ns
}

// TestPublishAsBatch: with a suitable server, a flush is one batch. The messages have the writer's id.
func TestPublishAsBatch(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	p := w.publisher(w1)
	w.publish(p, 1, 10)
	m, err := w.c.lastOnce(w.ctx, p.stream, p.subject)
	if err != nil {
		t.Fatal(err)
	}
	if m.header.Get(headerBatchSeq) != "10" || m.header.Get(headerBatchCommit) != "1" {
		t.Fatalf("headers %v", m.header)
	}
	if id, flush, pos := m.writer(); id != p.id || flush != 1 || pos != 9 {
		t.Fatalf("writer %s %d %d", id, flush, pos)
	}
	w.publish(p, 11, 1)
	if m, err = w.c.lastOnce(w.ctx, p.stream, p.subject); err != nil {
		t.Fatal(err)
	}
	if id, flush, pos := m.writer(); id != p.id || flush != 2 || pos != 0 || m.header.Get(headerBatchID) != "" {
		t.Fatalf("writer %s %d %d, headers %v", id, flush, pos, m.header)
	}
	w.wantLog(11)
	found, ok := w.publisher(w1).Found()
	if !ok || found.Seq != 11 || string(found.Data) != "11" {
		t.Fatalf("found %+v %v", found, ok)
	}
	last, err := w.c.lastOn(w.ctx, p.stream, p.subject)
	if err != nil || last.Seq != 11 {
		t.Fatal(last, err)
	}
	if _, err := w.c.lastOn(w.ctx, p.stream, p.subject+".nobody"); !errors.Is(err, ErrNotFound) {
		t.Fatal(err)
	}
	if seq, err := p.Publish(w.ctx, nil); err != nil || seq != 11 {
		t.Fatalf("publishing nothing: %d, %v", seq, err)
	}
}

// TestPublishSingly: the same without batches, on a stream without them, and on a server that accepts only small ones.
func TestPublishSingly(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	batching := w.publisher(w1) // opened while the stream had batches
	w.noBatches()
	w.publish(w.publisher(w1), 1, 50)
	if _, err := batching.Publish(w.ctx, numbered(51, 10)); !errors.Is(err, ErrConflict) {
		t.Fatal(err)
	}
	again := w.publisher(w1)
	again.atomic = true // as with an outdated state
	refused := 0
	again.o.Retry = func(error) { refused++ }
	w.publish(again, 51, 20)
	w.publish(again, 71, 20)
	if refused != 1 || again.atomic {
		t.Errorf("%d batches were refused, want to have learnt from the first", refused)
	}
	w.wantLog(90)
}

func TestPublishSmallBatches(t *testing.T) {
	t.Parallel()
	srv := plainServer(t, &server.Options{JetStream: true, StoreDir: t.TempDir(),
		JetStreamLimits: server.JSLimitOpts{MaxBatchSize: 10}})
	w := &world{t: t, ctx: ctxFor(t), c: connect(t, ConnOptions{URLs: []string{srv.ClientURL()}})}
	w.join()
	w.publish(w.publisher(w1), 1, 50)
	w.publish(w.publisher(w1), 51, 5)
	w.wantLog(55)
}

// join creates the namespace with one partition.
func (w *world) join() {
	w.t.Helper()
	var err error
	if w.ns, err = JoinNamespace(w.ctx, w.c, NamespaceConfig{Name: "test", Partitions: 1}); err != nil {
		w.t.Fatal(err)
	}
	if err = w.ns.EnsureStreams(w.ctx, LogConfig{MaxBytes: 256 << 20}); err != nil {
		w.t.Fatal(err)
	}
}

func TestPublishSizes(t *testing.T) {
	t.Parallel()
	for _, batch := range []bool{true, false} {
		w := newWorld(t, 1)
		if !batch {
			w.noBatches()
		}
		p := w.publisher(w1)
		big := bytes.Repeat([]byte{'x'}, p.MaxMessage())
		if len(big) < 1<<20-1024 {
			t.Fatalf("a message may have %d bytes", len(big))
		}
		if _, err := p.Publish(w.ctx, [][]byte{big}); err != nil {
			t.Fatal(err)
		}
		flush := make([][]byte, 30) // more than the server queues at once
		for i := range flush {
			flush[i] = big
		}
		if seq, err := p.Publish(w.ctx, flush); err != nil || seq != 31 {
			t.Fatal(seq, err)
		}
		_, err := p.Publish(w.ctx, [][]byte{{1}, append(big, 'x')})
		if !errors.Is(err, ErrTooLarge) || !strings.Contains(err.Error(), fmt.Sprint(len(big))) ||
			!strings.Contains(err.Error(), "message 2 of 2") {
			t.Fatal(err)
		}
		if last := w.info().Last; last != 31 {
			t.Fatalf("something was sent: %d", last)
		}
		if seq, err := p.Publish(w.ctx, [][]byte{{}}); err != nil || seq != 32 {
			t.Fatal(seq, err)
		}
	}
}

// TestPublishersRace: of publishers opened at the same message, one succeeds, and the others get its id.
func TestPublishersRace(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 3, 10} {
		newWorld(t, 1).publishersRace(n)
	}
}

func (w *world) publishersRace(n int) {
	t := w.t
	t.Helper()
	w.publish(w.publisher(w1), 1, 3)
	ps := make([]*Publisher, 8)
	for i := range ps {
		ps[i] = w.publisher(w1)
	}
	errs := make([]error, len(ps))
	var wg sync.WaitGroup
	for i, p := range ps {
		wg.Go(func() { _, errs[i] = p.Publish(w.ctx, numbered(4, n)) })
	}
	wg.Wait()
	winner := -1
	for i, err := range errs {
		if err == nil {
			if winner >= 0 {
				t.Fatal("two got through")
			}
			winner = i
		}
	}
	if winner < 0 {
		t.Fatal(errs)
	}
	for i, err := range errs {
		if i == winner {
			continue
		}
		var c *conflictError
		if !errors.Is(err, ErrConflict) || !errors.As(err, &c) || c.Writer != ps[winner].id || c.Expected != 3 {
			t.Fatalf("loser: %v", err)
		}
		if _, err := ps[i].Publish(w.ctx, numbered(1, 1)); !errors.Is(err, ErrConflict) {
			t.Fatalf("a fenced publisher publishes: %v", err)
		}
	}
	w.wantLog(3 + n)
	// The winner continues until a later publisher sends a message.
	w.publish(ps[winner], 4+n, 1)
	late := w.publisher(w1)
	w.publish(ps[winner], 5+n, 1)
	if _, err := late.Publish(w.ctx, numbered(1, n)); !errors.Is(err, ErrConflict) {
		t.Fatalf("opened and overtaken: %v", err)
	}
	w.publish(w.publisher(w1), 6+n, 2)
	if _, err := ps[winner].Publish(w.ctx, numbered(1, n)); !errors.Is(err, ErrConflict) {
		t.Fatalf("the first shim was not fenced: %v", err)
	}
	w.wantLog(7 + n)
}

// TestPublishAfterPurge: the last message of the subject was trimmed, and the server expects 0.
func TestPublishAfterPurge(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 5, 10} {
		w := newWorld(t, 1)
		p := w.publisher(w1)
		w.publish(p, 1, 10)
		other := w.publisher(events.RankKey{Instance: "w2"})
		w.publish(other, 11, 10)
		w.purge(15)
		seq, err := p.Publish(w.ctx, numbered(21, n))
		if err != nil || seq != events.StreamSeq(20+n) {
			t.Fatal(seq, err)
		}
		// A second publisher in between is not detected if all of its messages were trimmed too, and is detected
		// otherwise.
		second := w.publisher(w1)
		w.publish(second, 21+n, 1)
		if _, err := p.Publish(w.ctx, numbered(1, n)); !errors.Is(err, ErrConflict) {
			t.Fatal(err)
		}
		// All messages trimmed, and the publisher reopened.
		w.purge(w.info().Last + 1)
		fresh := w.publisher(w1)
		if _, ok := fresh.Found(); ok {
			t.Fatal("found what was trimmed")
		}
		w.publish(fresh, 1, n)
	}
}

// TestPublishLost: the log was recreated under the publisher, empty or with another publisher's messages.
func TestPublishLost(t *testing.T) {
	t.Parallel()
	for _, other := range []bool{false, true} {
		for _, n := range []int{1, 5, 10} {
			w := newWorld(t, 1)
			p := w.publisher(w1)
			w.publish(p, 1, 10)
			w.recreate()
			if other {
				w.publish(w.publisher(w1), 1, 20)
			}
			for range 2 {
				if _, err := p.Publish(w.ctx, numbered(11, n)); !errors.Is(err, ErrLost) {
					t.Fatalf("other %v: %v", other, err)
				}
			}
			again := w.publisher(w1)
			w.publish(again, 1, n)
		}
	}
}

// TestPublishAckLost: the message is stored without an acknowledgement. The publisher finds it, and does not store it
// twice.
func TestPublishAckLost(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 5, 100} {
		w := newWorld(t, 1)
		px := newProxy(t, w.addr)
		ns := w.through(px, patience) // attempts do not expire
		p, err := ns.OpenPublisher(w.ctx, w1, PublisherOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.Publish(w.ctx, numbered(1, n)); err != nil {
			t.Fatal(err)
		}
		px.deaf.Store(true)
		done := make(chan error, 1)
		go func() {
			_, err := p.Publish(w.ctx, numbered(n+1, n))
			done <- err
		}()
		stored := func(n int) bool { return w.info().Last > events.StreamSeq(n) }
		testkit.Eventually(t, "a message is stored", func() bool { return stored(n) })
		px.deaf.Store(false)
		px.cut()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		w.wantLog(2 * n)
		// Cancelled by the caller while indeterminate, and sent again in another grouping: the reader skips known
		// messages.
		px.deaf.Store(true)
		ctx, cancel := context.WithCancel(w.ctx)
		go func() {
			_, err := p.Publish(ctx, numbered(2*n+1, n))
			done <- err
		}()
		testkit.Eventually(t, "a message of the second batch is stored", func() bool { return stored(2 * n) })
		cancel()
		if err := <-done; !errors.Is(err, ErrUnavailable) {
			t.Fatal(err)
		}
		px.deaf.Store(false)
		px.cut()
		w.publish(p, 2*n+1, n+1)
		if last, dropped := w.dedupe(); last != 3*n+1 || dropped == 0 {
			t.Fatalf("the log ends at %d with %d duplicates", last, dropped)
		}
	}
}

// TestPublishCutInBatch: the connection ends after a number of bytes of a batch. All messages are stored once.
func TestPublishCutInBatch(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	px := newProxy(t, w.addr)
	ns := w.through(px, patience)
	retries := 0
	p, err := ns.OpenPublisher(w.ctx, w1, PublisherOptions{Retry: func(error) { retries++ }})
	if err != nil {
		t.Fatal(err)
	}
	next := 1
	for _, bytes := range []int64{0, 1, 100, 5000, 20000, 39000} {
		for before := retries; retries == before; next += 200 { // the cut may hit the next batch, or a ping
			if px.budget.Load() < 0 {
				px.budget.Store(bytes)
			}
			if _, err := p.Publish(w.ctx, numbered(next, 200)); err != nil {
				t.Fatal(err)
			}
		}
	}
	w.wantLog(next - 1)
}

// TestPublishThroughTrouble publishes through a connection that is cut and a server that restarts at random. A
// successful call has stored its messages once. A cancelled call may have stored some, and its events are sent again. A
// reader that skips known numbers receives exactly the published ones.
func TestPublishThroughTrouble(t *testing.T) {
	t.Parallel()
	var callers testkit.Group
	defer callers.Wait()
	for _, patient := range []bool{true, false} {
		callers.Run(t, fmt.Sprintf("patient %v", patient), func(t *testing.T) {
			w := newWorld(t, 1)
			px := newProxy(t, w.addr)
			ns := w.through(px, 500*time.Millisecond)
			rng := rand.New(rand.NewPCG(4, 4))
			troubles := 16
			if testing.Short() {
				troubles = 6
			}
			over := make(chan struct{})
			go func() {
				defer close(over)
				rng := rand.New(rand.NewPCG(5, 5))
				for i := range troubles {
					for !ns.c.Connected() {
						time.Sleep(time.Millisecond)
					}
					time.Sleep(time.Duration(rng.IntN(20)) * time.Millisecond)
					switch i % 4 {
					case 0:
						px.budget.Store(rng.Int64N(20000))
						for px.budget.Load() >= 0 && w.ctx.Err() == nil {
							time.Sleep(time.Millisecond)
						}
					case 1:
						px.deaf.Store(true)
						time.Sleep(5 * time.Millisecond)
						px.deaf.Store(false)
						px.cut()
					case 2:
						w.restart()
					default:
						px.cut()
					}
				}
			}()
			p, err := ns.OpenPublisher(w.ctx, w1, PublisherOptions{})
			if err != nil {
				t.Fatal(err)
			}
			acked, failures := 0, 0
			for going := true; going; {
				select {
				case <-over:
					going = false
				default:
				}
				n := 1 + rng.IntN(100)*rng.IntN(2)
				ctx, cancel := w.ctx, context.CancelFunc(func() {})
				if !patient {
					ctx, cancel = context.WithTimeout(w.ctx, time.Duration(1+rng.IntN(30))*time.Millisecond)
				}
				_, err := p.Publish(ctx, numbered(acked+1, n))
				cancel()
				switch {
				case err == nil:
					acked += n
				case patient || !errors.Is(err, ErrUnavailable):
					t.Fatal(err)
				default:
					failures++
				}
			}
			if !patient && failures == 0 {
				t.Error("nothing was ever in doubt")
			}
			if patient {
				w.wantLog(acked)
				t.Logf("%d published", acked)
				return
			}
			last, dropped := w.dedupe()
			if last < acked {
				t.Fatalf("%d were acknowledged, the log has %d", acked, last)
			}
			t.Logf("%d acknowledged, %d calls given up, %d duplicates dropped by the reader", acked, failures, dropped)
		})
	}
}

// TestPublishFull: a server without room refuses, and accepts messages again when there is room, without a restart.
func TestPublishFull(t *testing.T) {
	t.Parallel()
	srv := plainServer(t, &server.Options{JetStream: true, StoreDir: t.TempDir(), JetStreamMaxStore: 4 << 20,
		JetStreamMaxMemory: 64 << 20})
	w := &world{t: t, ctx: ctxFor(t), c: connect(t, ConnOptions{URLs: []string{srv.ClientURL()}})}
	var err error
	if w.ns, err = JoinNamespace(w.ctx, w.c, NamespaceConfig{Name: "test", Partitions: 1}); err != nil {
		t.Fatal(err)
	}
	if err := w.ns.EnsureStreams(w.ctx, LogConfig{MaxBytes: 1 << 30}); !errors.Is(err, ErrFull) {
		t.Fatalf("a stream larger than the server: %v", err)
	}
	cfg := map[string]any{"name": Names("test").Stream(0), "subjects": []string{Names("test").streamSubjects(0)},
		"storage": "file", "retention": "limits", "allow_direct": true, "allow_atomic": true}
	if err := w.c.call(w.ctx, "create", "STREAM.CREATE."+Names("test").Stream(0), cfg, nil); err != nil {
		t.Fatal(err)
	}
	p := w.publisher(w1)
	big := make([]byte, 500_000)
	var stored events.StreamSeq
	for {
		seq, err := p.Publish(w.ctx, [][]byte{big})
		if err == nil {
			stored = seq
			continue
		}
		if !errors.Is(err, ErrFull) {
			t.Fatal(err)
		}
		break
	}
	if stored < 4 {
		t.Fatalf("full after %d", stored)
	}
	if _, err := p.Publish(w.ctx, slices.Repeat([][]byte{big}, 10)); !errors.Is(err, ErrFull) {
		t.Fatal(err)
	}
	w.purge(stored)
	if seq, err := p.Publish(w.ctx, [][]byte{big}); err != nil || seq <= stored {
		t.Fatal(seq, err)
	}

	// A publisher with Persist waits for room, and publishes each message once.
	refusals := 0
	p, err = w.ns.OpenPublisher(w.ctx, w1, PublisherOptions{Persist: true, Retry: func(err error) {
		if refusals++; errors.Is(err, ErrFull) {
			info, err := w.ns.StreamInfo(w.ctx, 0)
			if err != nil {
				t.Fatal(err)
			}
			w.purge(info.Last)
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	before, err := w.ns.StreamInfo(w.ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	seq, err := p.Publish(w.ctx, slices.Repeat([][]byte{big}, 20))
	if err != nil || seq != before.Last+20 || refusals == 0 {
		t.Fatalf("%d after %d, %v; %d refusals", seq, before.Last, err, refusals)
	}
}

func TestPublishWhileNobodyThere(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	p := w.publisher(w1)
	w.srv.Stop()
	ctx, cancel := context.WithTimeout(w.ctx, 100*time.Millisecond)
	defer cancel()
	if _, err := p.Publish(ctx, numbered(1, 1)); !errors.Is(err, ErrUnavailable) {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := p.Publish(w.ctx, numbered(1, 10))
		done <- err
	}()
	w.restart()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	w.wantLog(10)
	w.c.Close()
	if _, err := p.Publish(w.ctx, numbered(1, 1)); !errors.Is(err, ErrUnavailable) {
		t.Fatal(err)
	}
}

// TestPublishWithoutStream: a publisher waits for a missing stream.
func TestPublishWithoutStream(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	p := w.publisher(w1)
	w.deleteStream()
	ctx, cancel := context.WithTimeout(w.ctx, 100*time.Millisecond)
	defer cancel()
	if _, err := p.Publish(ctx, numbered(1, 3)); !errors.Is(err, ErrUnavailable) {
		t.Fatal(err)
	}
	if _, err := w.ns.OpenPublisher(w.ctx, w1, PublisherOptions{}); !errors.Is(err, ErrNotFound) {
		t.Fatal(err)
	}
}

// TestBatchesAreWorthIt: on one server, many small messages; with replicas, more than one message.
func TestBatchesAreWorthIt(t *testing.T) {
	small, large := make([]byte, 1000), make([]byte, 768<<10)
	few, many := [][]byte{small, small}, [][]byte{small, small, small, small, small, small, small, small}
	for _, c := range []struct {
		replicas int
		msgs     [][]byte
		want     bool
	}{
		{1, few, false}, {1, many, true}, {1, slices.Repeat([][]byte{large}, 8), false}, {1,
			append(slices.Clone(many), large), true},
		{3, few[:1], false}, {3, few, true}, {3, slices.Repeat([][]byte{large}, 8), true},
	} {
		if p := (&Publisher{replicas: c.replicas}); p.worthBatch(c.msgs) != c.want {
			t.Errorf("%d messages, the last of %d bytes, %d replicas: want %v", len(c.msgs), len(c.msgs[len(c.msgs)-1]),
				c.replicas, c.want)
		}
	}
}

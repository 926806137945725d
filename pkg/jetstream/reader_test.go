package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// testReader checks a transcript: messages and notices in the expected order.
type testReader struct {
	t    testing.TB
	ctx  context.Context
	r    *Reader
	out  chan Update
	rest []Message // received and not yet consumed
	at   Position
}

// to returns a Deliver that sends to a channel.
func to(out chan<- Update) func(context.Context, Update) {
	return func(ctx context.Context, u Update) {
		select {
		case out <- u:
		case <-ctx.Done():
		}
	}
}

func startReader(t testing.TB, ns *Namespace, after Position) *testReader {
	t.Helper()
	return startReaderWith(t, ns, ReaderConfig{After: after, Watch: 50 * time.Millisecond})
}

func startReaderWith(t testing.TB, ns *Namespace, cfg ReaderConfig) *testReader {
	t.Helper()
	tr := &testReader{t: t, ctx: ctxFor(t), out: make(chan Update), at: cfg.After}
	cfg.Deliver = to(tr.out)
	r, err := ns.StartReader(cfg)
	if err != nil {
		t.Fatal(err)
	}
	tr.r = r
	t.Cleanup(r.Stop)
	return tr
}

func (tr *testReader) next() Update {
	tr.t.Helper()
	select {
	case u := <-tr.out:
		for _, m := range u.Messages {
			if m.Seq != tr.at.Seq+1 {
				tr.t.Fatalf("message %d follows %d", m.Seq, tr.at.Seq)
			}
			tr.at = Position{Epoch: u.Epoch, Seq: m.Seq, Time: m.Time}
		}
		if (u.Notice != nil) == (len(u.Messages) > 0) {
			tr.t.Fatalf("an update needs messages or a notice: %+v", u)
		}
		return u
	case <-tr.ctx.Done():
		tr.t.Fatalf("nothing came after %d", tr.at.Seq)
		return Update{}
	}
}

// messages expects messages from to to, with their numbers as data unless shifted. It skips losses of the connection.
func (tr *testReader) messages(from, to events.StreamSeq) {
	tr.t.Helper()
	tr.shifted(from, to, 0)
}

func (tr *testReader) shifted(from, to events.StreamSeq, shift int) {
	tr.t.Helper()
	for seq := from; seq <= to; {
		if len(tr.rest) == 0 {
			u := tr.next()
			switch u.Notice.(type) {
			case nil, Unavailable, Recovered:
			default:
				tr.t.Fatalf("%v instead of message %d", u.Notice, seq)
			}
			tr.rest = u.Messages
			continue
		}
		m := tr.rest[0]
		tr.rest = tr.rest[1:]
		if m.Seq != seq || string(m.Data) != fmt.Sprint(int(seq)+shift) {
			tr.t.Fatalf("message %d %q instead of %d %d", m.Seq, m.Data, seq, int(seq)+shift)
		}
		seq++
	}
}

// notice expects a notice. It skips earlier losses of the connection, unless the notice is about the connection.
func (tr *testReader) notice(want Notice) {
	tr.t.Helper()
	for {
		if len(tr.rest) > 0 {
			tr.t.Fatalf("message %d instead of %v", tr.rest[0].Seq, want)
		}
		u := tr.next()
		tr.rest = u.Messages
		if u.Notice == nil {
			continue
		}
		if _, ok := want.(Unavailable); ok {
			if _, ok := u.Notice.(Unavailable); !ok {
				tr.t.Fatalf("%v instead of unavailable", u.Notice)
			}
			return
		}
		if u.Notice == want {
			break
		}
		switch u.Notice.(type) {
		case Unavailable, Recovered:
		default:
			tr.t.Fatalf("%v instead of %v", u.Notice, want)
		}
	}
	switch want.(type) {
	case Truncated, EpochChanged, Regressed: // the reader ends after it
		select {
		case <-tr.r.done:
		case <-tr.ctx.Done():
			tr.t.Fatalf("the reader goes on after %v", want)
		}
	}
}

func (w *world) info() StreamInfo {
	w.t.Helper()
	info, err := w.ns.StreamInfo(w.ctx, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	return info
}

func (w *world) purge(keepFrom events.StreamSeq) {
	w.t.Helper()
	if err := w.ns.Purge(w.ctx, 0, w.info().Epoch, keepFrom); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) publish(p *Publisher, from, n int) {
	w.t.Helper()
	if _, err := p.Publish(w.ctx, numbered(from, n)); err != nil {
		w.t.Fatal(err)
	}
}

// recreate deletes the stream of partition 0 and creates it again.
func (w *world) recreate() {
	w.t.Helper()
	w.deleteStream()
	if err := w.ns.EnsureStreams(w.ctx, LogConfig{MaxBytes: 256 << 20}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) deleteStream() {
	w.t.Helper()
	if err := w.c.call(w.ctx, "delete", "STREAM.DELETE."+Names("test").Stream(0), nil, nil); err != nil {
		w.t.Fatal(err)
	}
}

func TestReaderFollows(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	rd := startReader(t, w.ns, Position{})
	rd.notice(CaughtUp{0})
	p := w.publisher(w1)
	for from := 1; from < 3000; from += 500 {
		w.publish(p, from, 500)
		rd.messages(events.StreamSeq(from), events.StreamSeq(from+499))
	}
	if rd.at.Epoch != w.info().Epoch {
		t.Errorf("epoch %d, the stream's is %d", rd.at.Epoch, w.info().Epoch)
	}
	// From the middle, at another reader's end.
	rd.r.Stop()
	from := rd.at
	w.publish(p, 3001, 10)
	rd = startReader(t, w.ns, from)
	rd.messages(3001, 3010)
	rd.notice(CaughtUp{3010})
	// From the end.
	rd.r.Stop()
	rd = startReader(t, w.ns, rd.at)
	rd.notice(CaughtUp{3010})
	w.publish(p, 3011, 1)
	rd.messages(3011, 3011)
}

func TestReaderSurvivesRestarts(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	p := w.publisher(w1)
	w.publish(p, 1, 100)
	rd := startReader(t, w.ns, Position{})
	rd.messages(1, 100)
	rd.notice(CaughtUp{100})
	epoch := rd.at.Epoch
	for i := range 3 {
		w.srv.Stop()
		rd.notice(Unavailable{})
		w.restart()
		w.publish(p, 101+10*i, 10)
		rd.messages(events.StreamSeq(101+10*i), events.StreamSeq(110+10*i))
	}
	if rd.at.Epoch != epoch || w.info().Epoch != epoch {
		t.Errorf("a restart changed the epoch: %d, %d, %d", epoch, rd.at.Epoch, w.info().Epoch)
	}
}

// TestReaderEpoch: the case in which nats.go's ordered consumer waits for ever, and the case in which it continues in
// the wrong stream.
func TestReaderEpoch(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0, 50, 150} {
		t.Run(fmt.Sprintf("anew with %d", n), func(t *testing.T) {
			w := newWorld(t, 1)
			p := w.publisher(w1)
			w.publish(p, 1, 100)
			rd := startReader(t, w.ns, Position{})
			rd.messages(1, 100)
			rd.notice(CaughtUp{100})
			old := w.info().Epoch
			w.recreate()
			if n > 0 {
				w.publish(w.publisher(w1), 1001, n)
			}
			changed := EpochChanged{Old: old, New: w.info().Epoch, First: 1, Last: events.StreamSeq(n)}
			for u := (Update{}); u.Notice != changed; {
				u = rd.next()
				switch got := u.Notice.(type) {
				case Unavailable, Recovered:
				case EpochChanged:
					got.Last = changed.Last // the notice may be older than the last message
					if got != changed {
						t.Fatalf("%v, want %v", got, changed)
					}
					u.Notice = changed
				default:
					t.Fatalf("%+v", u)
				}
			}
			<-rd.r.done
			// A new reader at the old position reports it at once. A reader without an epoch reads the new stream.
			startReader(t, w.ns, rd.at).notice(EpochChanged{Old: old, New: changed.New, First: 1,
				Last: events.StreamSeq(n)})
			rd = startReader(t, w.ns, Position{})
			rd.shifted(1, events.StreamSeq(n), 1000)
			rd.notice(CaughtUp{events.StreamSeq(n)})
		})
	}
}

func TestReaderStreamDeleted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.publish(w.publisher(w1), 1, 10)
	rd := startReader(t, w.ns, Position{})
	rd.messages(1, 10)
	rd.notice(CaughtUp{10})
	old := w.info().Epoch
	w.deleteStream()
	rd.notice(Unavailable{})
	if err := w.ns.EnsureStreams(w.ctx, LogConfig{}); err != nil {
		t.Fatal(err)
	}
	rd.notice(EpochChanged{Old: old, New: w.info().Epoch, First: 1, Last: 0})
}

func TestReaderBelowFirst(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.publish(w.publisher(w1), 1, 100)
	w.purge(31)
	epoch := w.info().Epoch
	startReader(t, w.ns, Position{}).notice(Truncated{Wanted: 1, First: 31})
	startReader(t, w.ns, Position{Epoch: epoch, Seq: 9}).notice(Truncated{Wanted: 10, First: 31})
	rd := startReader(t, w.ns, Position{Epoch: epoch, Seq: 30, Time: 12345}) // 30 is trimmed
	rd.messages(31, 100)
	rd.notice(CaughtUp{100})
	// An emptied stream is at its end.
	w.purge(101)
	startReader(t, w.ns, Position{Epoch: epoch, Seq: 100}).notice(CaughtUp{100})
	startReader(t, w.ns, Position{Epoch: epoch, Seq: 99}).notice(Truncated{Wanted: 100, First: 101})
}

func TestReaderBeyondLast(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.publish(w.publisher(w1), 1, 100)
	rd := startReader(t, w.ns, Position{Epoch: w.info().Epoch, Seq: 150})
	rd.notice(Regressed{Applied: 150, Last: 100})
}

func TestReaderOtherMessageAtPosition(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.publish(w.publisher(w1), 1, 100)
	rd := startReader(t, w.ns, Position{})
	rd.messages(1, 100)
	at := rd.at
	startReader(t, w.ns, at).notice(CaughtUp{100})
	at.Time++
	startReader(t, w.ns, at).notice(Regressed{Applied: 100, Last: 100})
}

// TestReaderPurgedPast: a reader reports a purge that overtakes it.
func TestReaderPurgedPast(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	p := w.publisher(w1)
	for i := range 10 {
		w.publish(p, 1+i*1000, 1000)
	}
	rd := startReaderWith(t, w.ns, ReaderConfig{Watch: 50 * time.Millisecond, maxMessages: 10})
	rd.messages(1, 5)
	w.purge(9001)
	// Messages on the way may still arrive. Then the notice has the exact loss.
	for {
		u := rd.next()
		switch u.Notice.(type) {
		case nil, Unavailable, Recovered:
			continue
		}
		if u.Notice != (Truncated{Wanted: rd.at.Seq + 1, First: 9001}) {
			t.Fatalf("%v after %d", u.Notice, rd.at.Seq)
		}
		break
	}
	<-rd.r.done
	rd = startReader(t, w.ns, Position{Epoch: rd.at.Epoch, Seq: 9000})
	rd.messages(9001, 10000)
}

// TestReaderHole: messages missing in the middle, as after damage to a file, are reported, and a reader can continue
// after them.
func TestReaderHole(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	// Our streams refuse deletion. This stream has otherwise the same settings.
	w.deleteStream()
	cfg := map[string]any{"name": Names("test").Stream(0), "subjects": []string{Names("test").streamSubjects(0)},
		"storage": "file", "retention": "limits", "allow_direct": true}
	if err := w.c.call(w.ctx, "create", "STREAM.CREATE."+Names("test").Stream(0), cfg, nil); err != nil {
		t.Fatal(err)
	}
	w.publish(w.publisher(w1), 1, 100)
	remove := func(seqs ...int) {
		for _, seq := range seqs {
			if err := w.c.call(w.ctx, "delete", "STREAM.MSG.DELETE."+Names("test").Stream(0), map[string]any{"seq": seq},
				nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	remove(40, 41, 42, 100)
	epoch := w.info().Epoch
	rd := startReader(t, w.ns, Position{})
	rd.messages(1, 39)
	rd.notice(Truncated{Wanted: 40, First: 43})
	rd = startReader(t, w.ns, Position{Epoch: epoch, Seq: 42})
	rd.messages(43, 99)
	// The end is missing, without a later message to show it.
	rd.notice(Truncated{Wanted: 100, First: 101})
	rd = startReader(t, w.ns, Position{Epoch: epoch, Seq: 100})
	rd.notice(CaughtUp{100})
	// The message at the position itself is missing: no wanted message is missing.
	rd = startReader(t, w.ns, Position{Epoch: epoch, Seq: 42, Time: 1})
	rd.messages(43, 99)
	rd = startReader(t, w.ns, Position{Epoch: epoch, Seq: 41, Time: 1})
	rd.notice(Truncated{Wanted: 42, First: 43})
	rd = startReader(t, w.ns, Position{Epoch: epoch, Seq: 100, Time: 1})
	rd.notice(CaughtUp{100})
}

// copyDir copies a folder of files, like a backup.
func copyDir(t testing.TB, from, to string) {
	t.Helper()
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
}

// restore replaces the server's folder by a copy and restarts the server.
func (w *world) restore(backup string) {
	w.t.Helper()
	w.srv.Stop()
	w.dir = filepath.Join(w.t.TempDir(), "restored")
	copyDir(w.t, backup, w.dir)
	w.srv = startServer(w.t, w.dir, w.addr)
}

// backup stops the server, copies its folder, and starts it again.
func (w *world) backup() string {
	w.t.Helper()
	w.srv.Stop()
	to := filepath.Join(w.t.TempDir(), "backup")
	copyDir(w.t, w.dir, to)
	w.srv = startServer(w.t, w.dir, w.addr)
	return to
}

func TestReaderRestoredFromBackup(t *testing.T) {
	t.Parallel()
	for _, grown := range []int{0, 5, 30} {
		t.Run(fmt.Sprintf("grown by %d", grown), func(t *testing.T) {
			w := newWorld(t, 1)
			p := w.publisher(w1)
			w.publish(p, 1, 100)
			old := w.backup()
			w.publish(p, 101, 20)
			rd := startReader(t, w.ns, Position{})
			rd.messages(1, 120)
			rd.notice(CaughtUp{120})
			rd.r.Stop()
			w.restore(old)
			if grown > 0 {
				w.publish(w.publisher(w1), 2001, grown)
			}
			// With 30 new messages, the stream is longer than the read part, with the same epoch: only the time of 120
			// differs.
			startReader(t, w.ns, rd.at).notice(Regressed{Applied: 120, Last: events.StreamSeq(100 + grown)})
			// The publisher had an acknowledgement for 120.
			_, err := p.Publish(w.ctx, numbered(121, 1))
			if grown == 0 && !errors.Is(err, ErrLost) || err == nil {
				t.Errorf("publish on a log with losses: %v", err)
			}
		})
	}
}

// TestReaderRegressedLive: the same during a read.
func TestReaderRegressedLive(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	p := w.publisher(w1)
	w.publish(p, 1, 100)
	old := w.backup()
	w.publish(p, 101, 20)
	rd := startReader(t, w.ns, Position{})
	rd.messages(1, 120)
	rd.notice(CaughtUp{120})
	w.restore(old)
	rd.notice(Regressed{Applied: 120, Last: 100})
}

func TestReaderStopsWhileNobodyTakes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	p := w.publisher(w1)
	w.publish(p, 1, 900)
	out := make(chan Update)
	r, err := w.ns.StartReader(ReaderConfig{Deliver: to(out), maxMessages: 10})
	if err != nil {
		t.Fatal(err)
	}
	<-out
	r.Stop()
	select {
	case u := <-out:
		t.Fatalf("sent after Stop: %+v", u)
	default:
	}
	// Also without a server.
	if r, err = w.ns.StartReader(ReaderConfig{Deliver: to(out)}); err != nil {
		t.Fatal(err)
	}
	w.srv.Stop()
	r.Stop()
}

func TestReaderRefusals(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	if _, err := w.ns.StartReader(ReaderConfig{Partition: 2, Deliver: to(make(chan Update))}); err == nil ||
		!strings.Contains(err.Error(), "partition 2") {
		t.Error(err)
	}
	if _, err := w.ns.StartReader(ReaderConfig{}); err == nil {
		t.Error("no channel")
	}
}

// TestReaderBackPressure: large messages and a slow receiver.
func TestReaderBackPressure(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	p := w.publisher(w1)
	rng := rand.New(rand.NewPCG(3, 3))
	var want [][]byte
	for range 8 {
		var msgs [][]byte
		for range 10 {
			b := make([]byte, rng.IntN(p.MaxMessage()))
			b[0] = byte(len(want) + len(msgs))
			msgs = append(msgs, b)
		}
		if _, err := p.Publish(w.ctx, msgs); err != nil {
			t.Fatal(err)
		}
		want = append(want, msgs...)
	}
	rd := startReaderWith(t, w.ns, ReaderConfig{Watch: 20 * time.Millisecond, MaxBytes: 1 << 20})
	got := 0
	for got < len(want) {
		u := rd.next()
		size := 0
		for _, m := range u.Messages {
			if len(m.Data) != len(want[got]) || m.Data[0] != want[got][0] {
				t.Fatalf("message %d differs", got)
			}
			size += len(m.Data)
			got++
		}
		if size > 3<<20 {
			t.Fatalf("an update of %d bytes", size)
		}
	}
	rd.notice(CaughtUp{events.StreamSeq(len(want))})
}

func TestReadersShareAChannel(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 4)
	counts := make([]int, 4)
	for i := range 40 {
		key := events.RankKey{Instance: events.WorkerID(fmt.Sprint("worker-", i))}
		p := w.publisher(key)
		counts[p.Partition()] += 7
		w.publish(p, 1, 7)
	}
	out := make(chan Update)
	for part := range events.Partition(4) {
		r, err := w.ns.StartReader(ReaderConfig{Partition: part, Deliver: to(out)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(r.Stop)
	}
	got := make([]int, 4)
	for caught := 0; caught < 4; {
		u := <-out
		for _, m := range u.Messages {
			got[u.Partition]++
			if _, p, _, err := parseEventSubject(m.Subject); err != nil || p != u.Partition {
				t.Fatalf("%s in partition %d, %v", m.Subject, u.Partition, err)
			}
		}
		if _, ok := u.Notice.(CaughtUp); ok {
			caught++
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(counts) {
		t.Fatalf("got %v, want %v", got, counts)
	}
}

func TestParseDelivery(t *testing.T) {
	t.Parallel()
	want := delivery{streamSeq: 30, consumerSeq: 4, time: 1700000000123, pending: 7}
	for _, reply := range []string{
		"$JS.ACK.S.C.1.30.4.1700000000123456789.7",
		"$JS.ACK._.hash.S.C.1.30.4.1700000000123456789.7",
		"$JS.ACK.domain.hash.S.C.1.30.4.1700000000123456789.7.random",
		"$JS.ACK.domain.hash.S.C.1.30.4.1700000000123456789.7.random.more",
	} {
		if d, ok := parseDelivery(reply); !ok || d != want {
			t.Errorf("%s: %+v %v", reply, d, ok)
		}
	}
	for _, reply := range []string{"", "$JS.ACK.", "$JS.ACK.S.C.1.30.4.5", "$JS.ACK.a.S.C.1.30.4.5.6",
		"$JS.ACK.S.C.1.x.4.5.6", "$JS.ACK.S.C.1..4.5.6", "$JS.ACK.S.C.1.99999999999999999999.4.5.6", "_INBOX.a"} {
		if d, ok := parseDelivery(reply); ok {
			t.Errorf("%q: %+v", reply, d)
		}
	}
}

func FuzzParseDelivery(f *testing.F) {
	f.Add("$JS.ACK.S.C.1.30.4.1700000000123456789.7")
	f.Add("$JS.ACK._.h.S.C.1.30.4.1700000000123456789.7.t")
	f.Fuzz(func(t *testing.T, reply string) {
		d, ok := parseDelivery(reply)
		if !ok {
			return
		}
		// The naive parser.
		tokens := strings.Split(reply, ".")
		if len(tokens) > 9 {
			tokens = append(tokens[:2:2], tokens[4:]...)
		}
		for i, v := range []uint64{uint64(d.streamSeq), d.consumerSeq, uint64(d.time), d.pending} {
			var n json.Number = json.Number(strings.TrimLeft(tokens[5+i], "0"))
			if n == "" {
				n = "0"
			}
			x, err := n.Int64()
			if i == 2 {
				x /= 1e6
			}
			if err == nil && uint64(x) != v {
				t.Fatalf("%q: field %d is %d, not %s", reply, i, v, n)
			}
		}
	})
}

func TestNoticesPrintEpochs(t *testing.T) {
	got := EpochChanged{Old: 1, New: 1763712000_000000000, First: 2, Last: 3}.String()
	const want = "epoch changed from 1970-01-01T00:00:00.000000001Z to 2025-11-21T08:00:00Z, which has 2 to 3"
	if got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

package jetstream

import (
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestEndProof computes the proof of a stream's end, step by step.
func TestEndProof(t *testing.T) {
	begun := time.Now()
	at := func(s float64) time.Time {
		if s == 0 {
			return time.Time{}
		}
		return begun.Add(time.Duration(s * float64(time.Second)))
	}
	var p endProof
	for i, step := range []struct {
		looked  float64 // time of a look at the leader; 0: none
		last    events.StreamSeq
		failed  bool // a look has failed
		sent    events.StreamSeq
		emptied float64 // the consumer had nothing more then; 0: unknown
		want    float64 // read to the end then; 0: not later than before
		why     string
	}{
		{sent: 0, want: 0, why: "nobody has said anything"},
		{looked: 1, last: 5, sent: 3, want: 0, why: "two messages are to come"},
		{sent: 4, emptied: 2, want: 0, why: "the consumer has nothing more, and the leader has messages"},
		{sent: 5, want: 1, why: "the leader's messages have been delivered"},
		{sent: 6, emptied: 3, want: 3, why: "the consumer has nothing more, and the leader agrees"},
		{sent: 6, emptied: 3.2, want: 0, why: "that is hardly later"},
		{looked: 5, last: 6, sent: 6, want: 5, why: "the leader has no more"},
		{failed: true, sent: 6, emptied: 6, want: 0,
			why: "the look failed: the consumer may be cut off with an old copy"},
		{looked: 7, last: 8, sent: 6, emptied: 7.5, want: 0, why: "it was"},
		{looked: 9, last: 10, sent: 8, want: 7, why: "the messages of the first look have been delivered"},
		{sent: 9, emptied: 9.5, want: 0, why: "but not the messages of the later look"},
		{sent: 10, emptied: 11, want: 11, why: "now it is"},
	} {
		if step.looked != 0 {
			p.looked(at(step.looked), step.last)
		}
		if step.failed {
			p.lookFailed()
		}
		if got := p.known(step.sent, at(step.emptied), 500*time.Millisecond); !got.Equal(at(step.want)) {
			t.Errorf("step %d: %v, want %v: %s", i, got.Sub(begun), at(step.want).Sub(begun), step.why)
		}
	}
	if p.looked(at(20), 10); !p.known(10, at(21), 0).IsZero() {
		t.Error("a result with least 0")
	}
}

// TestReaderTellsOfTheEnd: a reader repeats AtEnd with later times while the server answers. It sends none before the
// end, or while the server is away.
func TestReaderTellsOfTheEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	p := w.publisher(events.RankKey{Instance: "w"})
	w.publish(p, 1, 100)
	begun := time.Now()
	rd := startReaderWith(t, w.ns, ReaderConfig{Watch: 50 * time.Millisecond, Ends: time.Millisecond, maxMessages: 10})
	var last AtEnd
	ends := func(n int, upTo events.StreamSeq) {
		for n > 0 {
			u := rd.next()
			end, ok := u.Notice.(AtEnd)
			if !ok {
				continue
			}
			if end.Seq != rd.at.Seq || end.Time.Before(begun) || end.Time.After(time.Now()) ||
				!end.Time.After(last.Time) {
				t.Fatalf("%+v at %d, after %+v", end, rd.at.Seq, last)
			}
			last = end
			if end.Seq >= upTo {
				n--
			} else if upTo == 100 { // all messages were published before the reader's start
				t.Fatalf("the reported end is %d", end.Seq)
			}
		}
	}
	ends(5, 100)
	w.publish(p, 101, 10)
	ends(5, 110)
	w.srv.Stop()
	for down := false; !down; { // earlier notices may still arrive
		_, down = rd.next().Notice.(Unavailable)
	}
	begun = time.Now()
	back := time.After(200 * time.Millisecond)
	for waiting := true; waiting; {
		select {
		case u := <-rd.out:
			if end, ok := u.Notice.(AtEnd); ok {
				t.Fatalf("%+v without a server", end)
			}
		case <-back:
			waiting = false
		}
	}
	w.srv = startServer(t, w.dir, w.addr)
	ends(3, 110)
}

package jetstream

import (
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// What is known of a stream's end, said by said.
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
		looked  float64 // the leader was asked then; 0: it was not
		last    events.StreamSeq
		failed  bool // a look has failed
		sent    events.StreamSeq
		emptied float64 // the consumer had nothing more then; 0: it does not say
		want    float64 // read to the end then; 0: not known to be later than before
		why     string
	}{
		{sent: 0, want: 0, why: "nobody has said anything"},
		{looked: 1, last: 5, sent: 3, want: 0, why: "two messages are to come"},
		{sent: 4, emptied: 2, want: 0, why: "the consumer says it has no more, and the leader has"},
		{sent: 5, want: 1, why: "what the leader had is there"},
		{sent: 6, emptied: 3, want: 3, why: "the consumer says it has no more, and nothing speaks against it"},
		{sent: 6, emptied: 3.2, want: 0, why: "that is hardly later"},
		{looked: 5, last: 6, sent: 6, want: 5, why: "the leader has no more"},
		{failed: true, sent: 6, emptied: 6, want: 0,
			why: "the leader could not be asked: the consumer may be cut off with an old copy"},
		{looked: 7, last: 8, sent: 6, emptied: 7.5, want: 0, why: "it was"},
		{looked: 9, last: 10, sent: 8, want: 7, why: "what the leader had first is there"},
		{sent: 9, emptied: 9.5, want: 0, why: "but not what it had then"},
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
		t.Error("told though nobody wants to know")
	}
}

// A reader says again and again that it has read to the end, with later times, while the server answers; not before it
// has, nor while the server is away.
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
			} else if upTo == 100 { // all was published before the reader began
				t.Fatalf("the end was said to be %d", end.Seq)
			}
		}
	}
	ends(5, 100)
	w.publish(p, 101, 10)
	ends(5, 110)
	w.srv.Stop()
	for down := false; !down; { // what was said before may still be on its way
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

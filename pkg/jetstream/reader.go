package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Message is one message of the log. Data must not be written to.
type Message struct {
	Seq     events.StreamSeq
	Time    events.Millis // when the stream took it
	Subject string
	Key     events.RankKey // that Subject names, in a message of a [Reader]; zero if it names none
	Data    []byte
	Trace   string // the header of its publisher's trace, if it is sampled; see [ReaderConfig.Traced]
}

// Position is how far a partition's stream has been applied: what a snapshot keeps.
type Position struct {
	Epoch Epoch            // of the stream; 0: whichever is there
	Seq   events.StreamSeq // last message applied; 0: none

	// Time is when the stream took message Seq; 0 if not known. A reader that knows it makes sure that the
	// stream still has the same message there: a stream that was restored from an old backup and has grown
	// again is not otherwise told from the one that was.
	Time events.Millis
}

// Update is what a reader delivers: a run of messages, or a notice.
type Update struct {
	Partition events.Partition
	Epoch     Epoch // of the stream that is read

	Messages []Message // follow each other and all Messages before without a break; the receiver's own
	Pending  uint64    // how many messages were behind the last one when the server sent it

	Notice Notice // if not nil, there are no Messages
}

// Notice is one of [CaughtUp], [AtEnd], [Unavailable], [Recovered], and, as the last that a reader sends, [Truncated],
// [EpochChanged], [Regressed].
type Notice interface{ fmt.Stringer }

// CaughtUp says, once, that everything has been sent that was in the stream when the reader first saw it.
type CaughtUp struct{ Seq events.StreamSeq }

// AtEnd says that at a time, by this process's clock, the stream had nothing after message Seq, which has been sent. It
// is repeated for as long as that is known, with later times; see [ReaderConfig.Ends]. What proves it is that the
// stream's leader said so when it was looked at, or, between two such looks that agree with what was sent, that the
// consumer had nothing more to send.
type AtEnd struct {
	Seq  events.StreamSeq
	Time time.Time
}

// Unavailable says that nothing can be read for now. The reader keeps trying.
type Unavailable struct{ Err error }

// Recovered says that reading goes on after [Unavailable].
type Recovered struct{}

// Truncated says that messages Wanted to First-1 are not there: trimmed before they were read, or lost. What
// they said is not known. The reader has ended; another can start after First-1.
type Truncated struct{ Wanted, First events.StreamSeq }

// EpochChanged says that the stream was deleted and made again. Nothing that was read of the old one may be
// kept on the strength of the new one. The reader has ended.
type EpochChanged struct {
	Old, New    Epoch
	First, Last events.StreamSeq // of the new stream
}

// Regressed says that the stream is behind, or differs from, what was read of it: Applied was read, and the
// stream ends at Last or has another message at Applied. A server lost what it had, or was restored from an old
// backup. The reader has ended.
type Regressed struct{ Applied, Last events.StreamSeq }

func (n CaughtUp) String() string    { return fmt.Sprintf("caught up at %d", n.Seq) }
func (n AtEnd) String() string       { return fmt.Sprintf("the end is %d", n.Seq) }
func (n Unavailable) String() string { return fmt.Sprintf("unavailable: %v", n.Err) }
func (Recovered) String() string     { return "recovered" }
func (n Truncated) String() string {
	return fmt.Sprintf("truncated: wanted %d, first is %d", n.Wanted, n.First)
}
func (n EpochChanged) String() string {
	return fmt.Sprintf("epoch changed from %s to %s, which has %d to %d", n.Old, n.New, n.First, n.Last)
}
func (n Regressed) String() string {
	return fmt.Sprintf("regressed: %d was applied, the stream ends at %d or has another message there", n.Applied,
		n.Last)
}

// ReaderConfig says what to read and to whom it goes.
type ReaderConfig struct {
	Partition events.Partition
	After     Position // read what follows

	// Deliver is called with each update, from the reader's goroutine, which reads no more until it returns. ctx is done
	// when the reader is being stopped.
	Deliver func(ctx context.Context, u Update)

	Watch time.Duration // how often the stream is looked at for what no message tells; default 3 s.

	// Ends is the least time between two notices [AtEnd]; 0: none are sent. While nothing is published one can be sent
	// a second.
	Ends time.Duration

	Traced bool // Message.Trace is read

	// What the server is asked for at once; default 2000 messages and 8 MiB (at least what one message can
	// have). A reader holds at most three times as much: what is delivered, what is next, what is on the way.
	maxMessages int
	MaxBytes    int
}

// Reader reads one partition's stream whole, in order, for ever, over restarts and lost connections. The
// messages that it sends follow each other without a break in their sequences, from the position on: this
// proves that nothing is missing. Whatever would break the run is a notice.
type Reader struct {
	ns     *Namespace
	cfg    ReaderConfig
	stream string
	cancel context.CancelFunc
	done   chan struct{}

	// Below: owned by the reader's goroutine.
	pos      Position // of what was sent
	target   events.StreamSeq
	targeted bool // target is set
	caughtUp bool
	down     bool // Unavailable was sent last
	behind   int  // how often in a row the stream ended before pos
	end      endProof
}

// Waits of a reader.
const (
	readHeartbeat = time.Second      // how often the server says that a pull is still waiting
	readSilence   = 3                // so many heartbeats without a sound, and the consumer is taken for gone
	readExpiry    = 10 * time.Second // of a pull; it is renewed
	regressLooks  = 3                // a leader that was just elected may not have applied all it knows
	regressWait   = 250 * time.Millisecond
)

// StartReader starts a reader. It ends after a final notice or by [Reader.Stop].
func (n *Namespace) StartReader(cfg ReaderConfig) (*Reader, error) {
	if uint32(cfg.Partition) >= n.partitions {
		return nil, fmt.Errorf("read partition %d: there are %d", cfg.Partition, n.partitions)
	}
	if cfg.Deliver == nil {
		return nil, fmt.Errorf("read partition %d: no function that updates are delivered to", cfg.Partition)
	}
	cfg.Watch = cmp.Or(cfg.Watch, 3*time.Second)
	cfg.maxMessages = cmp.Or(cfg.maxMessages, 2000)
	cfg.MaxBytes = max(cmp.Or(cfg.MaxBytes, 8<<20), int(n.c.nc.MaxPayload())+4096)
	ctx, cancel := context.WithCancel(context.Background())
	r := &Reader{ns: n, cfg: cfg, stream: StreamName(n.name, cfg.Partition), cancel: cancel, done: make(chan struct{}),
		pos: cfg.After}
	go r.run(ctx)
	return r, nil
}

// Stop ends the reader and returns when it has ended: nothing is delivered afterwards. It may be called while Deliver
// blocks, if that returns when its context is done, and again.
func (r *Reader) Stop() {
	r.cancel()
	<-r.done
}

// Done is closed when the reader has ended: stopped, or after a final notice was delivered.
func (r *Reader) Done() <-chan struct{} { return r.done }

// run opens one session after the other: a session is the life of one consumer on one connection.
func (r *Reader) run(ctx context.Context) {
	defer close(r.done)
	defer r.cancel()
	pause := time.Duration(0)
	for ctx.Err() == nil {
		before := r.pos.Seq
		notice, err := r.session(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case notice != nil:
			r.send(ctx, Update{Notice: notice})
			return
		case errors.Is(err, errLookAgain) || r.pos.Seq != before:
			pause = 0
		}
		// What ends once and goes on at the first try is nobody's trouble.
		if pause > 0 && !r.down {
			r.down = r.send(ctx, Update{Notice: Unavailable{Err: failed("read "+r.stream, err)}})
		}
		if pause > 0 && !loop.Wait(ctx, pause) {
			return
		}
		pause = min(max(2*pause, 20*time.Millisecond), time.Second)
	}
}

// send delivers an update; false says that the reader is being stopped.
func (r *Reader) send(ctx context.Context, u Update) bool {
	u.Partition, u.Epoch = r.cfg.Partition, r.pos.Epoch
	r.cfg.Deliver(ctx, u)
	return ctx.Err() == nil
}

func (r *Reader) sendMessages(ctx context.Context, run []Message, pending uint64) {
	last := run[len(run)-1]
	if r.send(ctx, Update{Messages: run, Pending: pending}) {
		r.pos.Seq, r.pos.Time = last.Seq, last.Time
	}
}

func (r *Reader) look(ctx context.Context) (StreamInfo, error) {
	a, err := r.ns.c.infoOnce(ctx, r.stream)
	return a.info(r.cfg.Partition), err
}

// judge compares the stream with what was read of it up to applied. It returns a final notice, or errLookAgain
// where one look is not enough to be sure.
func (r *Reader) judge(info StreamInfo, applied events.StreamSeq) (Notice, error) {
	switch {
	case r.pos.Epoch != 0 && info.Epoch != r.pos.Epoch:
		return EpochChanged{Old: r.pos.Epoch, New: info.Epoch, First: info.First, Last: info.Last}, nil
	case info.Last < applied:
		if r.behind++; r.behind < regressLooks {
			return nil, errLookAgain
		}
		return Regressed{Applied: applied, Last: info.Last}, nil
	}
	r.behind = 0
	return nil, nil
}

// Why a session ends.
var (
	errLookAgain = errors.New("what was seen must be looked at again")
	errDelivery  = errors.New("messages were lost on the way")
	errEnded     = errors.New("the server ended the consumer")
	errSilent    = errors.New("no heartbeat from the consumer")
	errStuck     = errors.New("the consumer is silent and there are messages")
	errOtherMsg  = errors.New("another message at the position")
	errHole      = errors.New("sequences are missing in the stream")
)

// endProof tells until when a reader is known to have read its stream to the end. Two witnesses speak: the stream's
// leader, when it is looked at, which is seldom; and the consumer, which says each second that it has nothing more to
// send. The consumer may be on a server that has fallen behind the leader: it is believed only where it does not
// contradict the last look, and that succeeded.
type endProof struct {
	asked      time.Time        // when a look was sent whose end was not yet reached; zero: none
	askedEnd   events.StreamSeq // what that look said
	last       events.StreamSeq // what the last look said
	unverified bool             // the last look failed
	returned   time.Time        // by known, the last time
}

// looked records what the leader answered to a look that was sent at a time. If an earlier look waits for its end to be
// reached, that one stays.
func (p *endProof) looked(at time.Time, last events.StreamSeq) {
	p.last, p.unverified = last, false
	if p.asked.IsZero() {
		p.asked, p.askedEnd = at, last
	}
}

// lookFailed records that the leader could not be asked.
func (p *endProof) lookFailed() { p.unverified = true }

// known returns the latest time at which everything was sent that the stream had, when all up to seq has been sent and
// the consumer had nothing more at emptied (zero: it does not say). It returns zero if that is not known to be later,
// by least or more, than what it returned last; never if least is 0.
func (p *endProof) known(seq events.StreamSeq, emptied time.Time, least time.Duration) (at time.Time) {
	if !p.asked.IsZero() && seq >= p.askedEnd {
		at, p.asked = p.asked, time.Time{}
	}
	if !p.unverified && seq >= p.last && emptied.After(at) {
		at = emptied
	}
	if least <= 0 || at.IsZero() || at.Sub(p.returned) < least {
		return time.Time{}
	}
	p.returned = at
	return at
}

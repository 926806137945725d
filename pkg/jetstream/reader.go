package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Message is a message of the log. Data must not be changed.
type Message struct {
	Seq     events.StreamSeq
	Time    events.Millis // when the stream stored it
	Subject string
	Key     events.RankKey // named by Subject, in a message of a [Reader]; zero if there is none
	Data    []byte
	Trace   string // header of the publisher's trace, if sampled; see [ReaderConfig.Traced]
}

// Position is the applied part of a partition's stream, as stored in a snapshot.
type Position struct {
	Epoch Epoch            // of the stream; 0: any stream
	Seq   events.StreamSeq // last applied message; 0: none

	// Time is when the stream stored message Seq; 0: unknown. With a Time, a reader checks that the stream still has
	// the same message there. Otherwise a stream that was restored from an old backup and has grown again would look
	// like the original.
	Time events.Millis
}

// Update is a delivery of a reader: a run of messages, or a notice.
type Update struct {
	Partition events.Partition
	Epoch     Epoch // of the stream

	Messages []Message // consecutive with all earlier Messages; owned by the receiver
	Pending  uint64    // messages after the last one at the time of the send

	Notice Notice // if set, there are no Messages
}

// Notice is one of [CaughtUp], [AtEnd], [Unavailable], [Recovered], and, as the final update of a reader, [Truncated],
// [EpochChanged], [Regressed].
type Notice interface{ fmt.Stringer }

// CaughtUp: the reader has delivered all messages that the stream had at the reader's start. It is sent once.
type CaughtUp struct{ Seq events.StreamSeq }

// AtEnd: at Time, by this process's clock, the stream had no message after Seq, and Seq has been delivered. The reader
// repeats the notice with later times as long as the end is certain; see [ReaderConfig.Ends]. The end is certain after
// a look at the stream's leader. Between two looks that agree with the deliveries, the end is also certain while the
// consumer has nothing more to send.
type AtEnd struct {
	Seq  events.StreamSeq
	Time time.Time
}

// Unavailable: the log cannot be read for now. The reader keeps trying.
type Unavailable struct{ Err error }

// Recovered: reading continues after [Unavailable].
type Recovered struct{}

// Truncated: messages Wanted to First-1 are missing: trimmed before they were read, or lost. Their contents are
// unknown. The reader has ended. Another reader can start after First-1.
type Truncated struct{ Wanted, First events.StreamSeq }

// EpochChanged: the stream was deleted and recreated. Data of the old stream is not valid for the new one. The reader
// has ended.
type EpochChanged struct {
	Old, New    Epoch
	First, Last events.StreamSeq // of the new stream
}

// Regressed: the stream contradicts the data read from it. Applied was read, and the stream ends at Last or has another
// message at Applied. A server has lost messages, or was restored from an old backup. The reader has ended.
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

// ReaderConfig configures a Reader.
type ReaderConfig struct {
	Partition events.Partition
	After     Position // the reader starts after this position

	// Deliver is called with each update, from the reader's goroutine, which reads on when Deliver returns. ctx is done
	// when the reader is being stopped.
	Deliver func(ctx context.Context, u Update)

	Watch time.Duration // interval of looks at the stream for silent faults; default 3 s.

	// Ends is the least time between two notices [AtEnd]; 0: no notices. Without messages, the notice is possible once
	// a second.
	Ends time.Duration

	Traced bool // read Message.Trace

	// MaxBytes limits one fetch from the log, together with maxMessages. Defaults: 8 MiB, at least the largest message,
	// and 2,000 messages. A reader holds at most three times as much: the delivery, the next messages, and the messages on
	// the way.
	MaxBytes    int
	maxMessages int
}

// Reader reads a partition's stream completely and in order, across restarts and lost connections. Its messages have
// consecutive sequences from the position on, which proves that none is missing. Every break of the run is a notice.
type Reader struct {
	ns     *Namespace
	cfg    ReaderConfig
	stream string
	cancel context.CancelFunc
	done   chan struct{}

	// The reader's goroutine owns the following fields.
	pos      Position // of the last delivery
	target   events.StreamSeq
	targeted bool // target is set
	caughtUp bool
	down     bool // the last notice was Unavailable
	behind   int  // consecutive looks at which the stream ended before pos
	end      endProof
}

// Limits of a fetch from the log.
const (
	fetchMessages = 2000
	fetchBytes    = 8 << 20
)

// Times of a reader.
const (
	readExpiry   = 10 * time.Second // of a pull; pulls are renewed
	regressLooks = 3                // a newly elected leader may not have applied all its messages
	regressWait  = 250 * time.Millisecond
)

// StartReader starts a reader. It ends after a final notice or by [Reader.Stop].
func (n *Namespace) StartReader(cfg ReaderConfig) (*Reader, error) {
	if uint32(cfg.Partition) >= n.partitions {
		return nil, fmt.Errorf("read partition %d: there are %d", cfg.Partition, n.partitions)
	}
	if cfg.Deliver == nil {
		return nil, fmt.Errorf("read partition %d: ReaderConfig.Deliver is nil", cfg.Partition)
	}
	cfg.Watch = cmp.Or(cfg.Watch, 3*time.Second)
	cfg.maxMessages = cmp.Or(cfg.maxMessages, fetchMessages)
	cfg.MaxBytes = max(cmp.Or(cfg.MaxBytes, fetchBytes), int(n.c.nc.MaxPayload())+4096)
	ctx, cancel := context.WithCancel(context.Background())
	r := &Reader{ns: n, cfg: cfg, stream: n.name.Stream(cfg.Partition), cancel: cancel, done: make(chan struct{}),
		pos: cfg.After}
	go r.run(ctx)
	return r, nil
}

// Stop ends the reader and waits for its end: there is no later delivery. It may be called repeatedly, and while
// Deliver blocks, if Deliver returns when its context is done.
func (r *Reader) Stop() {
	r.cancel()
	<-r.done
}

// run runs one session after another, until a final notice.
func (r *Reader) run(ctx context.Context) {
	defer close(r.done)
	defer r.cancel()
	repeat(ctx, func() (last, progress bool, err error) {
		before := r.pos.Seq
		notice, err := r.session(ctx)
		if notice != nil && ctx.Err() == nil {
			r.send(ctx, Update{Notice: notice})
		}
		return notice != nil, r.pos.Seq != before, err
	}, func(err error) {
		if !r.down {
			r.down = r.send(ctx, Update{Notice: Unavailable{Err: failed("read "+r.stream, err)}})
		}
	})
}

// send delivers an update. It returns false if the reader is being stopped.
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

func (r *Reader) streamInfo(ctx context.Context) (StreamInfo, error) {
	a, err := r.ns.c.infoOnce(ctx, r.stream)
	return a.info(r.cfg.Partition), err
}

// judge compares the stream with the messages read up to applied. It returns a final notice, or errLookAgain if another
// look is needed.
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

// Further reasons for the end of a session.
var (
	errStuck    = errors.New("the consumer is silent although there are messages")
	errOtherMsg = errors.New("another message at the position")
	errHole     = errors.New("sequences are missing in the stream")
)

// endProof computes the latest time at which a reader had certainly read the stream to the end. There are two sources.
// A look at the stream's leader is rare. The consumer reports each second that there is nothing more to send, but the
// consumer's server may lag behind the leader. The consumer's report therefore counts only if the last look succeeded
// and agrees.
type endProof struct {
	asked      time.Time        // time of a look with an end that is not reached yet; zero: none
	askedEnd   events.StreamSeq // end of the stream at that look
	last       events.StreamSeq // end of the stream at the last look
	unverified bool             // the last look failed
	returned   time.Time        // last result of known
}

// looked records the leader's answer to a look of a time. An earlier look with an unreached end stays.
func (p *endProof) looked(at time.Time, last events.StreamSeq) {
	p.last, p.unverified = last, false
	if p.asked.IsZero() {
		p.asked, p.askedEnd = at, last
	}
}

// lookFailed records a failed look.
func (p *endProof) lookFailed() { p.unverified = true }

// known returns the latest time at which everything in the stream had been delivered, if all messages up to seq have
// been delivered and the consumer had nothing more at emptied (zero: unknown). The result is zero if that time is not
// later than the last result by at least least, and always if least is 0.
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

package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// session reads the whole stream with one consumer. The goroutine of nats.go fills its buffer. The goroutine of the
// reader empties it, and requests more messages (pulls) only after it has delivered the messages of the buffer.
type session struct {
	consumer
	first events.StreamSeq // the sequence of the first delivery

	// anchor, if Seq is not 0, is the last message of an earlier session, which must come first and be equal.
	anchor Message
	traced bool         // headers of traces are read
	pull   func() error // requests further messages

	keys keyCache // owned by deliver

	// Guarded by mu.
	buf     []Message
	left    int // messages that the server may still send for the requests
	pending uint64
	passed  bool      // the anchor has arrived, if there is one
	emptied time.Time // when the consumer last had nothing to send; zero: not since the last drain
}

// session reads until something ends it: a final notice, or an error after which another session may follow.
func (r *Reader) session(ctx context.Context) (Notice, error) {
	s := &session{consumer: newConsumer(r.ns.c, r.stream), first: r.pos.Seq + 1, passed: true, traced: r.cfg.Traced}
	s.deliver, s.status = s.append, s.pulled
	begun := time.Now()
	info, err := r.streamInfo(ctx)
	if err != nil {
		return nil, err
	}
	if notice, err := r.judge(info, r.pos.Seq); notice != nil || err != nil {
		if err != nil {
			loop.Wait(ctx, regressWait)
		}
		return notice, err
	}
	if info.First > r.pos.Seq+1 {
		return Truncated{Wanted: r.pos.Seq + 1, First: info.First}, nil
	}
	r.pos.Epoch = info.Epoch
	r.end.looked(begun, info.Last)
	if !r.targeted {
		r.target, r.targeted = info.Last, true
	}
	if r.pos.Time != 0 && r.pos.Seq >= info.First {
		s.anchor, s.first, s.passed = Message{Seq: r.pos.Seq, Time: r.pos.Time}, r.pos.Seq, false
	}
	name, _, forget, err := s.open(ctx, info.Epoch, jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: uint64(s.first),
	})
	if err != nil {
		return nil, err
	}
	defer forget()
	ask, err := json.Marshal(map[string]any{"batch": r.cfg.maxMessages, "max_bytes": r.cfg.MaxBytes,
		"expires": readExpiry, "idle_heartbeat": consumerHeartbeat})
	if err != nil {
		return nil, err
	}
	s.pull = func() error {
		s.mu.Lock()
		s.left += r.cfg.maxMessages
		s.mu.Unlock()
		return s.c.nc.PublishRequest(s.c.api+"CONSUMER.MSG.NEXT."+r.stream+"."+name, s.inbox, ask)
	}
	if r.down {
		r.down = !r.send(ctx, Update{Notice: Recovered{}})
	}
	return r.pump(ctx, s)
}

// pump delivers the session's messages, and compares the stream with them.
func (r *Reader) pump(ctx context.Context, s *session) (final Notice, err error) {
	var before events.StreamSeq // the session's position at the last look with more messages in the stream
	err = s.follow(ctx, r.cfg.Watch, func() error { return r.deliver(ctx, s) }, func(l look) (time.Duration, bool) {
		if l.err != nil {
			r.end.lookFailed()
			return r.cfg.Watch, true
		}
		info, next := l.info(r.cfg.Partition), s.first+events.StreamSeq(l.last)
		var again error
		if final, again = r.judge(info, next-1); final != nil {
			return 0, false
		}
		if again != nil {
			return regressWait, true
		}
		r.end.looked(l.at, info.Last)
		if info.Last >= next && next == before && s.position() == next {
			s.end(errStuck)
		}
		before = next
		return r.cfg.Watch, true
	})
	if err != nil {
		return r.ended(ctx, s, err)
	}
	return final, nil
}

// deliver delivers the messages of the buffer and the notices that follow from them, and requests more messages.
func (r *Reader) deliver(ctx context.Context, s *session) error {
	run, left, pending, passed, emptied, err := s.drain()
	if len(run) > 0 {
		r.sendMessages(ctx, run, pending)
	}
	if at := r.end.known(r.pos.Seq, emptied, r.cfg.Ends); passed && !at.IsZero() {
		r.send(ctx, Update{Notice: AtEnd{Seq: r.pos.Seq, Time: at}})
	}
	if err == nil && left <= r.cfg.maxMessages {
		err = s.pull()
	}
	if passed && !r.caughtUp && r.pos.Seq >= r.target {
		r.caughtUp = r.send(ctx, Update{Notice: CaughtUp{Seq: r.target}})
	}
	return err
}

// ended returns the consequence of a session's end.
func (r *Reader) ended(ctx context.Context, s *session, err error) (Notice, error) {
	switch {
	case errors.Is(err, errOtherMsg):
		info, err := r.streamInfo(ctx)
		if err != nil {
			return nil, err
		}
		if info.Epoch != r.pos.Epoch {
			return nil, errLookAgain
		}
		return Regressed{Applied: r.pos.Seq, Last: info.Last}, nil
	case errors.Is(err, errHole), errors.Is(err, errStuck):
		if !s.verified() {
			// The message at the position is missing, as after a trim: a server that is killed soon after a purge
			// restarts with some of the purged messages. Only the following messages matter.
			r.pos.Time = 0
			return nil, errLookAgain
		}
		return r.missing(ctx, s.position())
	}
	return nil, err
}

// missing checks whether a missing sequence is in the stream: it reads the first message from there on from the leader.
func (r *Reader) missing(ctx context.Context, wanted events.StreamSeq) (Notice, error) {
	first, err := r.ns.c.firstFrom(ctx, r.stream, wanted)
	if err != nil && classOf(err) != ErrNotFound {
		return nil, err
	}
	// If there is none, the end of the stream is missing, or the stream was recreated.
	info, lookErr := r.streamInfo(ctx)
	switch {
	case lookErr != nil:
		return nil, lookErr
	case info.Epoch != r.pos.Epoch:
		return nil, errLookAgain
	case err == nil && first > wanted:
		return Truncated{Wanted: wanted, First: first}, nil
	case err != nil && info.Last >= wanted:
		return Truncated{Wanted: wanted, First: info.Last + 1}, nil
	}
	return nil, errLookAgain // the message exists: the fault was the consumer's
}

// position returns the sequence of the next delivery.
func (s *session) position() events.StreamSeq { return s.first + events.StreamSeq(s.delivered()) }

// verified reports whether the anchor has been received, if there is one.
func (s *session) verified() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.passed
}

// drain returns and empties the buffer.
func (s *session) drain() (run []Message, left int, pending uint64, passed bool, emptied time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	run, s.buf = s.buf, nil
	emptied, s.emptied = s.emptied, time.Time{}
	return run, s.left, s.pending, s.passed, emptied, s.err
}

// append appends a message to the buffer.
func (s *session) append(d delivery, m *nats.Msg) error {
	switch next := s.first + events.StreamSeq(s.last); {
	case d.streamSeq != next:
		return fmt.Errorf("%w: received %d instead of %d", errHole, d.streamSeq, next)
	case !s.passed && d.time != s.anchor.Time:
		return errOtherMsg
	}
	s.left--
	if s.pending = d.pending; d.pending == 0 {
		s.emptied = time.Now()
	}
	if !s.passed {
		s.passed = true
		loop.Wake(s.wake)
		return nil
	}
	if s.buf == nil {
		s.buf = make([]Message, 0, 16+min(s.left, int(min(d.pending, 1<<20))))
	}
	next := Message{Seq: d.streamSeq, Time: d.time, Subject: m.Subject, Key: s.keys.key(m.Subject), Data: m.Data}
	if s.traced {
		next.Trace = m.Header.Get(headerTrace)
	}
	s.buf = append(s.buf, next)
	if len(s.buf) == 1 {
		loop.Wake(s.wake)
	}
	return nil
}

// keyCache maps event subjects to ranks.
type keyCache map[string]events.RankKey

// maxKeys bounds the subjects of a cache.
const maxKeys = 65536

// key returns the rank of an event subject, or zero for other subjects.
func (c *keyCache) key(subject string) events.RankKey {
	key, known := (*c)[subject]
	if known {
		return key
	}
	_, _, key, err := parseEventSubject(subject)
	if err != nil {
		return events.RankKey{}
	}
	if *c == nil {
		*c = keyCache{}
	}
	if len(*c) >= maxKeys {
		clear(*c)
	}
	(*c)[subject] = key
	return key
}

// pulled processes a status: a heartbeat, the end of a pull (out of time or bytes) with the number of unsent messages,
// or the end of the consumer.
func (s *session) pulled(code string, m *nats.Msg) error {
	defer loop.Wake(s.wake)
	if code == "100" { // a heartbeat, after the consumer had nothing to send for a while
		s.emptied = time.Now()
		return nil
	}
	unsent, err := strconv.Atoi(m.Header.Get("Nats-Pending-Messages"))
	if err != nil || code != "408" && code != "409" {
		return ended(m)
	}
	s.left -= unsent
	return nil
}

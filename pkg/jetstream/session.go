package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// session is a consumer: ephemeral, in memory, without acknowledgements, of the whole stream. nats.go's goroutine fills
// the buffer. The reader's goroutine empties the buffer, and pulls more only after the delivery of the contents.
//
// nats.go's ordered consumer recreates itself, and is not used. After a deletion and recreation of the stream, that
// consumer continues in the new stream at the old sequence, and only the reader can detect the change. Here, a new
// consumer is a new session, which begins with a comparison of the stream's epoch. Consume of nats.go is not used
// either: with a limit on bytes, Consume sometimes omits a pull and hangs until heartbeats are missing.
type session struct {
	// anchor, unless Seq is 0, is the first message of the session. It was read before and must be unchanged.
	anchor Message
	traced bool // read headers of traces
	wake   chan struct{}
	pull   func() error // requests further messages from the server

	keys keyCache // owned by receive

	mu      sync.Mutex
	next    events.StreamSeq
	nextDel uint64 // the consumer's sequence of the next delivery
	buf     []Message
	left    int // messages that the server may still send for the pulls
	pending uint64
	passed  bool      // the anchor has been received, or there is none
	heard   bool      // a message or heartbeat has arrived since the last beat
	emptied time.Time // when the consumer last had nothing more to send; zero: not since the last drain
	err     error     // reason for the end of the session
}

// session reads until a final notice, or until an error after which another session may follow.
func (r *Reader) session(ctx context.Context) (Notice, error) {
	c := r.ns.c
	lost := c.untilLost()
	begun := time.Now()
	info, err := r.look(ctx)
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

	s := &session{next: r.pos.Seq + 1, nextDel: 1, passed: true, traced: r.cfg.Traced,
		wake: make(chan struct{}, 1)}
	if r.pos.Time != 0 && r.pos.Seq >= info.First {
		s.anchor, s.next, s.passed = Message{Seq: r.pos.Seq, Time: r.pos.Time}, r.pos.Seq, false
	}
	stop, err := r.consume(ctx, s, info)
	if err != nil {
		return nil, err
	}
	defer stop()

	if r.down {
		r.down = !r.send(ctx, Update{Notice: Recovered{}})
	}
	return r.pump(ctx, s, lost)
}

// consume creates the consumer, which fills the session's buffer until stop is called. consume checks that the consumer
// is on the stream of info.
func (r *Reader) consume(ctx context.Context, s *session, info StreamInfo) (stop func(), err error) {
	c := r.ns.c
	name, _, forget, err := c.newConsumer(ctx, r.stream, info.Epoch, jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: uint64(s.next),
	})
	if err != nil {
		return nil, err
	}
	ask, err := json.Marshal(map[string]any{
		"batch": r.cfg.maxMessages, "max_bytes": r.cfg.MaxBytes, "expires": readExpiry, "idle_heartbeat": readHeartbeat,
	})
	if err != nil {
		forget()
		return nil, err
	}
	inbox := c.nc.NewInbox()
	sub, err := c.nc.Subscribe(inbox, s.receive)
	if err == nil {
		err = sub.SetPendingLimits(-1, -1) // pulls are the limit
	}
	if err != nil {
		forget()
		return nil, err
	}
	s.pull = func() error {
		s.mu.Lock()
		s.left += r.cfg.maxMessages
		s.mu.Unlock()
		return c.nc.PublishRequest(c.api+"CONSUMER.MSG.NEXT."+r.stream+"."+name, inbox, ask)
	}
	return func() {
		s.end(context.Canceled) // ignores later messages
		_ = sub.Unsubscribe()   // fails only without a connection
		forget()
	}, nil
}

// newConsumer creates an ephemeral consumer of a stream, in memory and without acknowledgements. It returns the number
// of pending messages. The stream of the epoch existed before. newConsumer checks that the consumer is of that stream;
// otherwise the error is errLookAgain.
func (c *Conn) newConsumer(ctx context.Context, stream string, epoch Epoch, cfg jetstream.ConsumerConfig) (name string,
	pending uint64, forget func(), err error) {
	cfg.Name = "kvatlas-" + nuid.Next()
	cfg.AckPolicy = jetstream.AckNonePolicy
	cfg.InactiveThreshold = 30 * time.Second // the server deletes it after our end
	cfg.Replicas, cfg.MemoryStorage = 1, true
	verb := stream + "." + cfg.Name
	if cfg.FilterSubject != "" {
		verb += "." + cfg.FilterSubject
	}
	var made struct {
		Pending uint64 `json:"num_pending"`
	}
	create := map[string]any{"stream_name": stream, "config": cfg}
	if err := c.callOnce(ctx, "CONSUMER.CREATE."+verb, create, &made); err != nil {
		return "", 0, nil, err
	}
	// Optional: without this message, the server waits for InactiveThreshold.
	forget = func() { _ = c.nc.Publish(c.api+"CONSUMER.DELETE."+stream+"."+cfg.Name, nil) }
	// The stream of this epoch existed before the consumer's creation and exists now, so it is the consumer's stream.
	now, err := c.infoOnce(ctx, stream)
	if err == nil && now.epoch() != epoch {
		err = errLookAgain
	}
	if err != nil {
		forget()
	}
	return cfg.Name, made.Pending, forget, err
}

// pump delivers the session's messages and monitors the session.
func (r *Reader) pump(ctx context.Context, s *session, lost <-chan struct{}) (Notice, error) {
	tick := time.NewTicker(r.cfg.Watch)
	defer tick.Stop()
	beat := time.NewTicker(readHeartbeat)
	defer beat.Stop()
	silence := 0
	looks := make(chan lookResult, 1)
	looking := false
	var lastLook events.StreamSeq // position of the session at the last look with further messages in the stream
	for {
		run, left, pending, passed, emptied, err := s.drain()
		if len(run) > 0 {
			r.sendMessages(ctx, run, pending)
		}
		if at := r.end.known(r.pos.Seq, emptied, r.cfg.Ends); passed && !at.IsZero() {
			r.send(ctx, Update{Notice: AtEnd{Seq: r.pos.Seq, Time: at}})
		}
		if err == nil && left <= r.cfg.maxMessages {
			if err := s.pull(); err != nil {
				s.end(err)
				continue
			}
		}
		if passed && !r.caughtUp && r.pos.Seq >= r.target {
			r.caughtUp = r.send(ctx, Update{Notice: CaughtUp{Seq: r.target}})
		}
		if err != nil {
			return r.ended(ctx, s, err)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-lost:
			s.end(errDisconnected)
		case <-s.wake:
		case <-beat.C:
			if silence++; s.sound() {
				silence = 0
			} else if silence >= readSilence {
				s.end(errSilent)
			}
		case <-tick.C:
			if !looking {
				looking = true
				next, sent := s.position(), time.Now()
				go func() {
					info, err := r.look(ctx)
					looks <- lookResult{info, err, next, sent}
				}()
			}
		case l := <-looks:
			looking = false
			if l.err != nil {
				r.end.lookFailed()
				if classOf(l.err) == ErrNotFound {
					s.end(l.err)
				}
				continue
			}
			notice, err := r.judge(l.info, l.next-1)
			if notice != nil {
				return notice, nil
			}
			if err != nil {
				tick.Reset(regressWait)
				continue
			}
			tick.Reset(r.cfg.Watch)
			r.end.looked(l.sent, l.info.Last)
			if l.info.Last >= l.next && l.next == lastLook && s.position() == l.next {
				s.end(errStuck)
			}
			lastLook = l.next
		}
	}
}

type lookResult struct {
	info StreamInfo
	err  error
	next events.StreamSeq // position of the session at the look
	sent time.Time
}

// ended returns the consequence of a session's end.
func (r *Reader) ended(ctx context.Context, s *session, err error) (Notice, error) {
	switch {
	case errors.Is(err, errOtherMsg):
		info, err := r.look(ctx)
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
	info, lookErr := r.look(ctx)
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

// end ends the session with the first error.
func (s *session) end(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
	}
	s.mu.Unlock()
	loop.Wake(s.wake)
}

// position returns the next expected sequence of the session.
func (s *session) position() events.StreamSeq {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.next
}

// verified reports whether the anchor has been received, if there is one.
func (s *session) verified() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.passed
}

// sound reports whether anything has arrived since the last call.
func (s *session) sound() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	heard := s.heard
	s.heard = false
	return heard
}

// drain returns and empties the buffer.
func (s *session) drain() (run []Message, left int, pending uint64, passed bool, emptied time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	run, s.buf = s.buf, nil
	emptied, s.emptied = s.emptied, time.Time{}
	return run, s.left, s.pending, s.passed, emptied, s.err
}

// receive handles one message from nats.go.
func (s *session) receive(msg *nats.Msg) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.heard = true
	if s.err != nil {
		return
	}
	d, ok := parseDelivery(msg.Reply)
	switch {
	case !ok:
		s.status(msg)
		return
	case d.consumerSeq != s.nextDel:
		s.err = fmt.Errorf("%w: received delivery %d instead of %d", errDelivery, d.consumerSeq, s.nextDel)
	case d.streamSeq != s.next:
		s.err = fmt.Errorf("%w: received %d instead of %d", errHole, d.streamSeq, s.next)
	case !s.passed && d.time != s.anchor.Time:
		s.err = errOtherMsg
	}
	if s.err != nil {
		loop.Wake(s.wake)
		return
	}
	s.next++
	s.nextDel++
	s.left--
	if s.pending = d.pending; d.pending == 0 {
		s.emptied = time.Now()
	}
	if !s.passed {
		s.passed = true
		loop.Wake(s.wake)
		return
	}
	if s.buf == nil {
		s.buf = make([]Message, 0, 16+min(s.left, int(min(d.pending, 1<<20))))
	}
	m := Message{Seq: d.streamSeq, Time: d.time, Subject: msg.Subject, Key: s.keys.key(msg.Subject), Data: msg.Data}
	if s.traced {
		m.Trace = msg.Header.Get(headerTrace)
	}
	s.buf = append(s.buf, m)
	if len(s.buf) == 1 {
		loop.Wake(s.wake)
	}
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
	_, _, key, err := ParseEventSubject(subject)
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

// status handles the server's report about a pull (ADR-13): a heartbeat, the end of a pull (out of time or bytes) with
// a number of unsent messages, or the end of the consumer. s.mu is held.
func (s *session) status(msg *nats.Msg) {
	code, text := msg.Header.Get("Status"), msg.Header.Get("Description")
	if code == "100" { // sent after a while without messages
		s.emptied = time.Now()
		loop.Wake(s.wake)
		return
	}
	unsent, err := strconv.Atoi(msg.Header.Get("Nats-Pending-Messages"))
	if err != nil || code != "408" && code != "409" {
		s.err = fmt.Errorf("%w: %s %s", errEnded, code, text)
	}
	s.left -= unsent
	loop.Wake(s.wake)
}

// delivery is the content of a message's reply subject (ADR-15; nats.go internal/parser):
//
//	$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>
//	$JS.ACK.<domain>.<account>.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>[.<token>]
type delivery struct {
	streamSeq   events.StreamSeq
	consumerSeq uint64
	time        events.Millis
	pending     uint64
}

func parseDelivery(reply string) (d delivery, ok bool) {
	rest, ok := strings.CutPrefix(reply, "$JS.ACK.")
	if !ok {
		return d, false
	}
	var tokens [10]string
	n := 0
	for more := true; more && n < len(tokens); n++ {
		tokens[n], rest, more = strings.Cut(rest, ".")
	}
	first := 3 // after stream, consumer, delivered
	switch {
	case n == 7:
	case n >= 9:
		first = 5
	default:
		return d, false
	}
	var v [4]uint64
	for i := range v {
		var err error
		if v[i], err = strconv.ParseUint(tokens[first+i], 10, 64); err != nil {
			return d, false
		}
	}
	return delivery{events.StreamSeq(v[0]), v[1], events.Millis(v[2] / 1e6), v[3]}, true
}

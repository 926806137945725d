package jetstream

import (
	"context"
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

// consumer receives messages of a stream in order, until the connection, the consumer on the server or a message is
// lost. It is ephemeral, in memory and without acknowledgements. [Reader] and [Bucket.Watch] continue with a new
// consumer ([repeat]), which begins with a comparison of the stream's epoch.
//
// The ordered consumer and the watcher of nats.go are not used. After a stream was deleted and recreated, the first
// continues in the new stream at the old sequence, and the second waits forever. Consume is not used either: with a
// limit on bytes it sometimes forgets to pull, and stops until heartbeats are missed.
type consumer struct {
	c      *Conn
	stream string
	inbox  string // the subject of deliveries and statuses
	wake   chan struct{}
	lost   <-chan struct{} // closed with the connection
	silent int             // heartbeats in a row without a sound; owned by follow

	// deliver processes the next message, and status a message of the server about the consumer (ADR-13). An error ends
	// the consumer. Both are called with mu held.
	deliver func(d delivery, m *nats.Msg) error
	status  func(code string, m *nats.Msg) error

	mu    sync.Mutex // guards the fields below, and those that deliver and status change
	last  uint64     // the number of the last delivery
	sound bool       // a message or status has arrived since the last heartbeat
	err   error      // the reason of the end
}

// Waits of a consumer.
const (
	consumerHeartbeat = time.Second // the period of the server's heartbeats
	consumerSilence   = 3           // heartbeats without a sound, after which the consumer counts as lost
)

// Reasons for the end of a consumer.
var (
	errLookAgain = errors.New("the state must be checked again")
	errDelivery  = errors.New("deliveries were lost")
	errEnded     = errors.New("the server ended the consumer")
	errSilent    = errors.New("no heartbeat from the consumer")
)

// newConsumer returns a consumer that [consumer.open] creates on the server.
func newConsumer(c *Conn, stream string) consumer {
	return consumer{c: c, stream: stream, inbox: c.nc.NewInbox(), wake: make(chan struct{}, 1), lost: c.untilLost()}
}

// open creates the consumer on the stream of an epoch, and returns its name, the number of messages to come and a
// function that ends it. The error is errLookAgain if another stream has the name.
func (s *consumer) open(ctx context.Context, epoch Epoch, cfg jetstream.ConsumerConfig) (name string, pending uint64,
	forget func(), err error) {
	cfg.Name = "kvatlas-" + nuid.Next()
	cfg.AckPolicy = jetstream.AckNonePolicy
	cfg.InactiveThreshold = 30 * time.Second // then the server removes the consumer, also without forget
	cfg.Replicas, cfg.MemoryStorage = 1, true
	verb := s.stream + "." + cfg.Name
	if cfg.FilterSubject != "" {
		verb += "." + cfg.FilterSubject
	}
	sub, err := s.c.nc.Subscribe(s.inbox, s.receive)
	if err != nil {
		return "", 0, nil, err
	}
	forget = func() {
		s.end(context.Canceled) // further messages are skipped
		_ = sub.Unsubscribe()   // fails only without a connection
		// The server removes the consumer later if this message is lost.
		_ = s.c.nc.Publish(s.c.api+"CONSUMER.DELETE."+s.stream+"."+cfg.Name, nil)
	}
	var made struct {
		Pending uint64 `json:"num_pending"`
	}
	if err = sub.SetPendingLimits(-1, -1); err == nil { // pulls and merged keys are the limit
		err = s.c.callOnce(ctx, "CONSUMER.CREATE."+verb, map[string]any{"stream_name": s.stream, "config": cfg}, &made)
	}
	if err == nil {
		// The stream of this epoch existed before the consumer and exists now. Therefore the consumer belongs to it.
		var now streamAnswer
		if now, err = s.c.infoOnce(ctx, s.stream); err == nil && now.epoch() != epoch {
			err = errLookAgain
		}
	}
	if err != nil {
		forget()
		return "", 0, nil, err
	}
	return cfg.Name, made.Pending, forget, nil
}

// receive is called by nats.go with one message after another.
func (s *consumer) receive(m *nats.Msg) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sound = true
	if s.err != nil {
		return
	}
	d, ok := parseDelivery(m.Reply)
	switch {
	case !ok:
		s.err = s.status(m.Header.Get("Status"), m)
	case d.consumerSeq != s.last+1:
		s.err = fmt.Errorf("%w: received delivery %d instead of %d", errDelivery, d.consumerSeq, s.last+1)
	default:
		if s.err = s.deliver(d, m); s.err == nil {
			s.last++
		}
	}
	if s.err != nil {
		loop.Wake(s.wake)
	}
}

// ended returns the error of a status that ends the consumer.
func ended(m *nats.Msg) error {
	return fmt.Errorf("%w: %s %s", errEnded, m.Header.Get("Status"), m.Header.Get("Description"))
}

// end ends the consumer with the first error.
func (s *consumer) end(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
	}
	s.mu.Unlock()
	loop.Wake(s.wake)
}

// checkSilence ends a heartbeat. It reports whether a message or status has arrived during the last heartbeats.
func (s *consumer) checkSilence() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.silent++; s.sound {
		s.silent = 0
	}
	s.sound = false
	return s.silent < consumerSilence
}

// look is the state of a stream, or the error of the request.
type look struct {
	streamAnswer
	err  error
	at   time.Time // of the request
	last uint64    // the number of the last delivery at that time
}

// follow calls drain after each change, and looked with the state of the stream after each period, from the caller's
// goroutine. drain returns the end of the consumer, which is the result of follow. looked returns the time until the
// next look, or false to end follow without an error.
func (s *consumer) follow(ctx context.Context, period time.Duration, drain func() error,
	looked func(l look) (next time.Duration, more bool)) error {
	tick := time.NewTicker(period)
	defer tick.Stop()
	beat := time.NewTicker(consumerHeartbeat)
	defer beat.Stop()
	looks := make(chan look, 1)
	looking := false
	for {
		if err := drain(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.lost:
			s.end(errDisconnected)
		case <-s.wake:
		case <-beat.C:
			if !s.checkSilence() {
				s.end(errSilent)
			}
		case <-tick.C:
			if !looking {
				looking = true
				l := look{at: time.Now(), last: s.delivered()}
				go func() {
					l.streamAnswer, l.err = s.c.infoOnce(ctx, s.stream)
					looks <- l
				}()
			}
		case l := <-looks:
			looking = false
			next, more := looked(l)
			if !more {
				return nil
			}
			tick.Reset(next)
			if l.err != nil && classOf(l.err) == ErrNotFound {
				s.end(l.err)
			}
		}
	}
}

// delivered returns the number of the last delivery.
func (s *consumer) delivered() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

// repeat runs one session after another, with growing pauses, until ctx ends or a session is the last. A session is the
// life of one consumer. The pauses start again after a session with progress. If the session after it fails as well,
// repeat calls unavailable before each pause.
func repeat(ctx context.Context, session func() (last, progress bool, err error), unavailable func(err error)) {
	retry, fails := newBackoff(), 0
	for ; ctx.Err() == nil; fails++ {
		last, progress, err := session()
		if last || ctx.Err() != nil {
			return
		}
		if progress {
			retry, fails = newBackoff(), 0
		}
		if fails > 0 {
			if !errors.Is(err, errLookAgain) {
				unavailable(err)
			}
			retry.Wait(ctx)
		}
	}
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

package source

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/usage"
	"github.com/kvatlas/kvatlas/internal/ingest/sharedstore"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// storeCheck is the time between two requests to the master for the number of its published batches.
const storeCheck = 500 * time.Millisecond

// Store relays the events of a Mooncake master: changes in a store that workers share.
type Store struct {
	*host.Shim
	Master string // HOST:PORT of the master's HTTP

	relay   shim.Relay
	conn    *jetstream.Conn
	subject string
	master  *sharedstore.Mooncake
	log     *slog.Logger
	watch   *watch

	unsent, gaps, unchecked host.Limiter
}

// Check checks the addresses. The error is a usage error.
func (s *Store) Check() error {
	var wrong usage.Complaints
	wrong.About("--engine, the master's event endpoint", zmtp.CheckEndpoint(s.Engine))
	if _, _, err := net.SplitHostPort(s.Master); err != nil {
		wrong.When(true, "--master %q is not HOST:PORT", s.Master)
	} else {
		_, err := jetstream.Names(s.Namespace).Store(s.Master)
		wrong.About("--master", err)
	}
	return wrong.Usage()
}

// Run relays the events of the master until ctx ends.
func (s *Store) Run(ctx context.Context, conn *jetstream.Conn, log *slog.Logger) (err error) {
	s.conn, s.log, s.relay = conn, log, shim.Relay{NewSession: rand.Uint64}
	for _, l := range []*host.Limiter{&s.unsent, &s.gaps, &s.unchecked} {
		l.Every = s.LogRepeat
	}
	if s.master, err = sharedstore.NewMooncake(sharedstore.MooncakeConfig{Address: s.Master}); err != nil {
		return err
	}
	if s.subject, err = jetstream.Names(s.Namespace).Store(s.Master); err != nil {
		return err
	}
	reports, err := jetstream.Names(s.Namespace).StoreSource(s.Master)
	if err != nil {
		return err
	}
	s.watch = newWatch(s.Shim, conn, reports, api.QuietSource{Store: s.Master, Advice: "check that --engine is the " +
		"event endpoint of a master with events; or let a worker store something: a master without writes publishes " +
		"nothing"}, log)
	failed := host.Limiter{Every: s.LogRepeat}
	sub, err := zmtp.DialSub(ctx, s.Engine, []string{""},
		zmtp.Config{Failed: func(_ zmtp.Peer, err error) {
			s.watch.unreached(masterEvents, err, eventsAdvice)
			failed.WarnTo(log, "no connection to the master's events", "engine", s.Engine, "error", err,
				"what_to_do", eventsAdvice)
		}})
	if err != nil {
		return err
	}
	defer sub.Stop()
	watching, stop := context.WithCancel(ctx)
	var watched sync.WaitGroup
	watched.Go(func() { s.watch.run(watching) })
	defer watched.Wait()
	defer stop()
	log.Info("starting", "engine", s.Engine, "nats", conn.ServerURL())
	return s.run(ctx, sub)
}

// Parts of a master, and the remedies for a missing connection to a part.
const (
	masterEvents = "the master's events"
	masterStatus = "the master's HTTP port"

	eventsAdvice = "check that the Mooncake master runs and publishes events at --engine; the shim dials until the master answers"
	statusAdvice = "check that --master is the HTTP address of a master with events"
)

// checked is the master's report about its stream.
type checked struct {
	sharedstore.EventStatus
	err error
}

func (s *Store) run(ctx context.Context, sub *zmtp.Sub) error {
	received := make(chan zmtp.Message)
	ended := make(chan error, 1)
	go func() {
		for {
			m, err := sub.Recv(ctx)
			if err != nil {
				ended <- err
				return
			}
			select {
			case received <- m:
			case <-ctx.Done():
			}
		}
	}()
	tick := time.NewTicker(storeCheck)
	defer tick.Stop()
	answers := make(chan checked, 1)
	requested := false
	for {
		select {
		case m := <-received:
			s.receive(m)
		case <-tick.C:
			if !requested {
				requested = true
				s.relay.Ask()
				go func() { answers <- s.status(ctx) }()
			}
		case a := <-answers:
			requested = false
			s.check(a)
		case err := <-ended:
			s.send(s.relay.Lost())
			return host.IgnoreEnd(ctx, err)
		}
	}
}

func (s *Store) receive(m zmtp.Message) {
	switch m.Kind {
	case zmtp.Opened:
		s.watch.reached(masterEvents)
		s.log.Info("connected to the master's events")
		s.send(s.relay.Lost())
	case zmtp.Closed:
		s.watch.unreached(masterEvents, m.Err, eventsAdvice)
		s.log.Warn("the connection to the master's events has ended; indexers poll the store", "error", m.Err,
			"what_to_do", eventsAdvice)
		s.send(s.relay.Lost())
	case zmtp.Data:
		s.watch.received()
		out, err := s.relay.Batch(m.Frames)
		s.gap(err)
		s.send(out)
	}
}

// status requests the report of the master within bounds.
func (s *Store) status(ctx context.Context) (c checked) {
	ctx, cancel := context.WithTimeout(ctx, 2*storeCheck)
	defer cancel()
	c.EventStatus, c.err = s.master.Events(ctx)
	if c.err == nil && !c.Enabled {
		c.err = errors.New("the master does not publish events: enable events in its build and its flags")
	}
	return c
}

func (s *Store) check(c checked) {
	if c.err != nil {
		s.watch.unreached(masterStatus, c.err, statusAdvice)
		s.unchecked.WarnTo(s.log, "the master does not report its published batches; indexers poll the store", "error", c.err,
			"what_to_do", statusAdvice)
		return
	}
	s.watch.reached(masterStatus)
	out, err := s.relay.Checked(c.Batches, c.Dropped)
	s.gap(err)
	s.send(out)
}

func (s *Store) gap(err error) {
	if err != nil {
		s.gaps.WarnTo(s.log, "events of the store are missing; indexers ask for a list", "error", err)
	}
}

// send relays messages. Their numbers show a lost message.
func (s *Store) send(list []sharedstore.Message) {
	for i := range list {
		if err := s.conn.Send(s.subject, "", sharedstore.AppendMessage(nil, &list[i])); err != nil {
			s.unsent.WarnTo(s.log, "not passed on", "error", err, "what_to_do",
				"check that the NATS server runs; indexers ask the store meanwhile")
		}
	}
}

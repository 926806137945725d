package main

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// sourceMooncake is the event stream of a Mooncake master, which tells what a store holds that workers share, and
// nothing of workers.
const sourceMooncake = "mooncake"

// storeCheck is how often the master is asked whether it has published more than came.
const storeCheck = 500 * time.Millisecond

// ofStores is the flags that say something of a store's shim; the rest is about workers.
var ofStores = []string{"source", "engine", "master", "namespace", "silence", "log-repeat", "log-level", "log-format"}

func (r *running) checkStore(flags *pflag.FlagSet) error {
	var wrong cli.Complaints
	wrong.About("--engine, the master's event endpoint", zmtp.CheckEndpoint(r.engine))
	if _, _, err := net.SplitHostPort(r.master); err != nil {
		wrong.When(true, "--master %q is not HOST:PORT", r.master)
	} else {
		_, err := jetstream.StoreSubject(r.namespace, r.master)
		wrong.About("--master", err)
	}
	wrong.About("--namespace", jetstream.CheckNamespace(r.namespace))
	flags.Visit(func(f *pflag.Flag) {
		known := slices.Contains(ofStores, f.Name) || f.Name == "nats" || strings.HasPrefix(f.Name, "nats-")
		wrong.When(!known, "--%s is not for --source %s", f.Name, sourceMooncake)
	})
	return wrong.Usage()
}

func (r *running) runStore(cmd *cobra.Command, log *slog.Logger) error {
	if err := r.checkStore(cmd.Flags()); err != nil {
		return err
	}
	ctx, log := cmd.Context(), log.With("store", r.master)
	conn, err := r.connect(ctx, log, "of store "+r.master, "indexers poll the store", true)
	if err != nil {
		return ignoreEnd(ctx, err)
	}
	defer conn.Close()
	master, err := hicache.NewMooncake(hicache.MooncakeConfig{Address: r.master})
	if err != nil {
		return err
	}
	subject, err := jetstream.StoreSubject(r.namespace, r.master)
	if err != nil {
		return err
	}
	reports, err := jetstream.StoreSourceSubject(r.namespace, r.master)
	if err != nil {
		return err
	}
	watch := r.watchSource(conn, reports, api.QuietSource{Store: r.master, Advice: r.silenceAdvice()}, log)
	failed := limiter{every: r.logWindow}
	sub, err := zmtp.DialSub(ctx, r.engine, []string{""},
		zmtp.Config{Hooks: zmtp.Hooks{Failed: func(_ zmtp.Peer, err error) {
			watch.unreached(masterEvents, err, eventsAdvice)
			failed.warn(log, "no connection to the master's events", "engine", r.engine, "error", err,
				"what_to_do", eventsAdvice)
		}}})
	if err != nil {
		return err
	}
	defer sub.Stop()
	s := &storeShim{relay: shim.Relay{NewSession: rand.Uint64}, conn: conn, subject: subject, master: master, log: log,
		watch: watch}
	watching, stop := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		watch.run(watching)
		close(watched)
	}()
	defer func() {
		stop()
		<-watched
	}()
	for _, l := range []*limiter{&s.unsent, &s.gaps, &s.unchecked} {
		l.every = r.logWindow
	}
	log.Info("starting", "engine", r.engine, "nats", conn.ServerURL())
	err = s.run(ctx, sub)
	if err == nil {
		log.Info("stopped")
	}
	return err
}

// Parts of a master, and what to do about one that is not reached.
const (
	masterEvents = "the master's events"
	masterStatus = "the master's HTTP port"

	eventsAdvice = "see that the Mooncake master runs and publishes events at --engine; it is dialled until it answers"
	statusAdvice = "see that --master is its HTTP address and that it was started with events"
)

// storeShim passes on. Its fields are run's, but for what is asked in status.
type storeShim struct {
	relay   shim.Relay
	conn    *jetstream.Conn
	subject string
	master  *hicache.Mooncake
	log     *slog.Logger
	watch   *sourceWatch

	unsent, gaps, unchecked limiter
}

// checked is what the master said of its stream.
type checked struct {
	hicache.EventStatus
	err error
}

func (s *storeShim) run(ctx context.Context, sub *zmtp.Sub) error {
	heard := make(chan zmtp.Message)
	ended := make(chan error, 1)
	go func() {
		for {
			m, err := sub.Recv(ctx)
			if err != nil {
				ended <- err
				return
			}
			select {
			case heard <- m:
			case <-ctx.Done():
			}
		}
	}()
	tick := time.NewTicker(storeCheck)
	defer tick.Stop()
	answers := make(chan checked, 1)
	asking := false
	for {
		select {
		case m := <-heard:
			s.receive(m)
		case <-tick.C:
			if !asking {
				asking = true
				s.relay.Ask()
				go func() { answers <- s.status(ctx) }()
			}
		case a := <-answers:
			asking = false
			s.check(a)
		case err := <-ended:
			s.send(s.relay.Lost())
			return ignoreEnd(ctx, err)
		}
	}
}

func (s *storeShim) receive(m zmtp.Message) {
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
		s.watch.heard()
		out, err := s.relay.Batch(m.Frames)
		s.gap(err)
		s.send(out)
	}
}

// status asks the master, within bounds.
func (s *storeShim) status(ctx context.Context) (c checked) {
	ctx, cancel := context.WithTimeout(ctx, 2*storeCheck)
	defer cancel()
	c.EventStatus, c.err = s.master.Events(ctx)
	if c.err == nil && !c.Enabled {
		c.err = errors.New("the master does not publish events: it was built or started without them")
	}
	return c
}

func (s *storeShim) check(c checked) {
	if c.err != nil {
		s.watch.unreached(masterStatus, c.err, statusAdvice)
		s.unchecked.warn(s.log, "the master does not say what it has published; indexers poll the store", "error", c.err,
			"what_to_do", statusAdvice)
		return
	}
	s.watch.reached(masterStatus)
	out, err := s.relay.Checked(c.Batches, c.Dropped)
	s.gap(err)
	s.send(out)
}

func (s *storeShim) gap(err error) {
	if err != nil {
		s.gaps.warn(s.log, "events of the store are missing; indexers ask for a list", "error", err)
	}
}

// send passes messages on. One that is lost on the way shows in the numbers.
func (s *storeShim) send(list []events.StoreMessage) {
	for i := range list {
		if err := s.conn.Send(s.subject, "", events.AppendStoreMessage(nil, &list[i])); err != nil {
			s.unsent.warn(s.log, "not passed on", "error", err, "what_to_do",
				"see that the NATS server runs; indexers ask the store meanwhile")
		}
	}
}

package shim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// runner is the state of a Run: the machine, and the timers and channels around the machine. The loop owns the machine.
type runner struct {
	cfg      Config
	machine  *Machine
	sub      *zmtp.Sub
	speakers speakers
	several  string // the last report of Observer.Several

	messages Receiver     // the engine's live socket; nil: there is a feed, or the messages have ended
	feed     <-chan Frame // nil: there is a socket, or the feed has ended
	flushes  chan flushed
	replay   replay // the running replay, if any
	snapshot conversation[snapshotted]
	lesson   conversation[*knowledge]
	retry    *time.Timer
	check    *time.Timer // the next check for missed messages
	watching watching
	stopping stopping

	lost       chan struct{}  // the lease may have expired
	keepFailed chan error     // the lease cannot be held
	requests   <-chan request // of the control server; nil: there is none

	look    bool // read the log as soon as no flight and no other read is under way
	looking bool
	resyncs resyncs
	span    span
	heardAt time.Time // the time of the engine's last message
	taken   uint64    // messages of the engine that the machine had processed at takenAt
	takenAt time.Time
	skips   events.SkipCounts // reported to the control server
	ended   bool              // the messages, or the feed, have ended
}

type flushed struct {
	outcome outcome
	last    events.StreamSeq // of the rank's messages in the log
	present Published        // the content of the log, unless the flight is stored
	err     error            // the error that ends Run
}

type outcome uint8

const (
	flightStored  outcome = iota // all of it is in the log
	flightFenced                 // a foreign message in the log: of a second shim, or of a node after the expired lease
	logRolledBack                // the log has lost acknowledged messages
	logRead                      // there was no flight
)

// setDefaults fills in the settings that are zero or negative.
func (cfg *Config) setDefaults() {
	cfg.ReplayTimeout = cmp.Or(max(cfg.ReplayTimeout, 0), 2*time.Second)
	cfg.IdleCheck = cmp.Or(max(cfg.IdleCheck, 0), 30*time.Second)
	cfg.RetryMin = cmp.Or(max(cfg.RetryMin, 0), 100*time.Millisecond)
	cfg.RetryMax = cmp.Or(max(cfg.RetryMax, 0), 5*time.Second)
	cfg.RetryReachable = cmp.Or(max(cfg.RetryReachable, 0), max(cfg.RetryMin, min(500*time.Millisecond, cfg.RetryMax)))
	cfg.SilentAfter = cmp.Or(max(cfg.SilentAfter, 0), 10*time.Second)
	cfg.QuietAfter = cmp.Or(max(cfg.QuietAfter, 0), DefaultQuietAfter)
	cfg.Sockets.RecvBytes = cmp.Or(max(cfg.Sockets.RecvBytes, 0), 16<<20)
	if len(cfg.Topics) == 0 {
		cfg.Topics = []string{""}
	}
	cfg.Observer = cmp.Or[Observer](cfg.Observer, Unobserved{})
	if cfg.Decoder == nil { // all frames are read already
		cfg.Decoder = Whole{}
	}
}

// newRunner returns a runner without an input; see open.
func newRunner(cfg Config) *runner {
	r := &runner{
		cfg:        cfg,
		flushes:    make(chan flushed, 1),
		retry:      time.NewTimer(time.Hour),
		check:      time.NewTimer(cfg.IdleCheck),
		lost:       make(chan struct{}, 1),
		keepFailed: make(chan error, 1),
		watching:   newWatching(&cfg, time.Now()),
		stopping:   stopping{requested: cfg.Stop, served: make(chan bool)},
	}
	r.retry.Stop()
	if cfg.Control != nil {
		r.requests = cfg.Control.requests
	}
	replay := cfg.Replay != ""
	if cfg.Feed != nil {
		replay = cfg.Source != nil
	}
	r.machine = NewMachine(cfg.Identity, cfg.Limits, replay, observed{cfg.Decoder, r})
	if cfg.Feed != nil && replay {
		r.machine.UseSnapshots()
	}
	if cfg.ClearUnreadable {
		r.machine.ClearUnreadable()
	}
	return r
}

// stopTimers stops all timers.
func (r *runner) stopTimers() {
	for _, t := range []*time.Timer{r.retry, r.check, r.watching.tick, r.watching.delayed, r.watching.quiet} {
		t.Stop()
	}
}

// open opens the input of the engine's messages.
func (r *runner) open(ctx context.Context) (err error) {
	cfg := &r.cfg
	switch {
	case cfg.Feed != nil:
		r.feed = cfg.Feed
	case cfg.Messages != nil:
		r.messages = cfg.Messages
	default:
		sockets := cfg.sockets()
		sockets.Failed = func(_ zmtp.Peer, err error) { cfg.Observer.Failed(cfg.Engine, err) }
		open := zmtp.DialSub
		if cfg.Listen {
			open = zmtp.ListenSub
		}
		if r.sub, err = open(ctx, cfg.Engine, cfg.Topics, sockets); err != nil {
			return fmt.Errorf("engine endpoint: %w", err)
		}
		r.messages = r.sub
	}
	return nil
}

// Run is the shim of one rank. It returns nil after the end of ctx or of the engine's messages. Other ends have an
// error: ErrFenced, ErrUnusable, the error of an invalid endpoint, or the error of Keep.
func Run(ctx context.Context, cfg Config) error {
	cfg.setDefaults()
	cfg.Control.begin(&cfg)
	r := newRunner(cfg)
	defer r.stopTimers()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := r.open(ctx); err != nil {
		return err
	}
	if r.sub != nil {
		defer r.sub.Stop()
	}
	published, err := r.recover(ctx)
	if err != nil || ctx.Err() != nil {
		return err
	}
	r.machine.Recovered(published, millis(time.Now()))
	if published.Unreadable != nil {
		cfg.Observer.LogUnreadable(published.Unreadable)
	}
	r.span.recovered(published, r.machine.Incarnation())
	if cfg.Source != nil {
		r.feedOpened()
	}
	if cfg.Keep != nil {
		go r.keep(ctx)
	}
	if cfg.Serving != "" {
		go r.watchServing(ctx)
	}
	err = r.loop(ctx)
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// keep holds the rank's lease.
func (r *runner) keep(ctx context.Context) {
	err := r.cfg.Keep(ctx, func() {
		loop.Wake(r.lost)
	})
	if err != nil {
		r.keepFailed <- err
	}
}

func millis(t time.Time) events.Millis { return events.Millis(t.UnixMilli()) }

// observed wraps the decoder, and reports errors and skipped events.
type observed struct {
	Decoder
	r *runner
}

func (o observed) Begin(payload []byte) (msg events.Message, more bool, err error) {
	msg, more, err = o.Decoder.Begin(payload)
	if err != nil {
		o.r.cfg.Observer.Undecodable(o.r.machine.Taken().Seq, err)
	}
	o.reportSkips()
	return msg, more, err
}

func (o observed) Continue() (part []events.Event, more bool) {
	part, more = o.Decoder.Continue()
	o.reportSkips()
	return part, more
}

// reportSkips passes the numbers of skipped events to the control server.
func (o observed) reportSkips() {
	if now := o.Counts(); now != o.r.skips && o.r.cfg.Control != nil {
		o.r.skips = now
		o.r.cfg.Control.update(func(h *engineHeard) { h.skips = now })
	}
}

// recover reads the last published state of this rank from the log. It retries until ctx ends.
func (r *runner) recover(ctx context.Context) (Published, error) {
	for retry := (loop.Backoff{Min: r.cfg.RetryMin, Max: r.cfg.RetryMax}); ; {
		p, err := r.cfg.Log.Last(ctx)
		if err == nil || errors.Is(err, ErrUnusable) {
			return p, err
		}
		if ctx.Err() != nil {
			return p, nil
		}
		r.cfg.Observer.LogFailed(err)
		retry.Wait(ctx)
	}
}

// sleep waits for half of d at least, and d at most.
func sleep(ctx context.Context, d time.Duration) { loop.Wait(ctx, d/2+rand.N(d/2+1)) }

// Give hands a frame to a shim by its [Config].Feed. It waits until the shim has received a large frame, so that large
// frames do not pile up in the channel. It returns when ctx ends.
func Give(ctx context.Context, feed chan<- Frame, f Frame) {
	if f.size() >= largeMessage {
		f.received = make(chan struct{})
	}
	select {
	case feed <- f:
	case <-ctx.Done():
		return
	}
	if f.received != nil {
		select {
		case <-f.received:
		case <-ctx.Done():
		}
	}
}

// receive handles the next message of the engine's live socket.
func (r *runner) receive() {
	msg, ok, err := r.messages.TryRecv()
	switch {
	case ok:
		r.processMessage(msg)
	case err != nil:
		r.messages, r.ended = nil, true
	}
}

// fed handles the next frame of the feed, or the end of the feed.
func (r *runner) fed(f Frame, ok bool) {
	if f.received != nil {
		close(f.received)
	}
	switch {
	case !ok:
		r.feed, r.ended = nil, true
	case f.Opened:
		r.feedOpened()
	default:
		r.heardAt = time.Now()
		r.machine.Live(f, millis(r.heardAt))
	}
}

// feedOpened sends a request to the source at once, and a second later, when the source certainly has the feed's
// subscription.
func (r *runner) feedOpened() {
	r.machine.Verify()
	r.heardAt = time.Time{}
	r.check.Reset(min(r.cfg.IdleCheck, time.Second))
}

// loop runs the machine until ctx ends, an error ends the shim, or the last event of an ended engine is in the log.
func (r *runner) loop(ctx context.Context) error {
	for {
		if err := r.begin(ctx); err != nil {
			return err
		}
		if entries, _ := r.machine.Queued(); entries == 0 && (r.ended || r.hasStopped()) {
			return nil
		}
		r.watch(ctx)
		if ended, err := r.wait(ctx); ended || err != nil {
			return err
		}
		r.report()
	}
}

// begin begins the work that is due: a look into the log, a request to the engine, a flight.
func (r *runner) begin(ctx context.Context) error {
	if r.look && !r.looking && !r.machine.InFlight() {
		r.look, r.looking = false, true
		go r.lookIntoLog(ctx)
	}
	ready, err := r.machine.Advance(!r.looking)
	if err != nil {
		return err
	}
	switch {
	case ready.Replay:
		r.startReplay(ctx, ready.From)
	case ready.Snapshot:
		r.startSnapshot(ctx)
	case ready.Learn.Known:
		r.startLearning(ctx, ready.Learn)
	}
	if ready.Flight != nil {
		r.watching.delayed.Reset(delayedAfter)
		go r.publish(ctx, ready.Flight)
	}
	return nil
}

// inputs are the channels with messages of the engine. They are nil while the machine accepts no messages.
type inputs struct {
	messages     <-chan struct{}
	feed         <-chan Frame
	replayed     <-chan replayed
	nextReplayed <-chan struct{}
	snapshotted  <-chan snapshotted
	lesson       <-chan *knowledge
}

// inputs returns the inputs that are open.
func (r *runner) inputs() (in inputs) {
	if r.machine.Full() {
		return in
	}
	in = inputs{feed: r.feed, replayed: r.replay.out, nextReplayed: r.replay.pace.due(), snapshotted: r.snapshot.out,
		lesson: r.lesson.out}
	if r.messages != nil {
		in.messages = r.messages.Ready()
	}
	return in
}

// wait waits for the next input, result, time or request, and handles it. ended means that ctx or the lease has ended.
func (r *runner) wait(ctx context.Context) (ended bool, err error) {
	in := r.inputs()
	select {
	case <-ctx.Done():
		return true, nil
	case <-in.messages:
		r.receive()
	case f, ok := <-in.feed:
		r.fed(f, ok)
	case got := <-in.replayed:
		r.replay.pace.received(got.frame.size())
		r.replayed(ctx, got)
	case <-in.nextReplayed:
		r.replay.pace.owed = false
	case got := <-in.snapshotted:
		r.snapshotted(got)
	case k := <-in.lesson:
		r.lesson.end()
		r.machine.Learned(k)
	case f := <-r.flushes:
		return false, r.landed(f)
	case <-r.retry.C:
		r.machine.RetryReplay()
	case now := <-r.check.C:
		r.checkIdle(now)
	case refused := <-r.watching.probed:
		r.afterProbe(refused)
	case now := <-r.watching.tick.C:
		if r.watching.presence.tick(now) {
			r.engineGone()
		}
	case <-r.watching.delayed.C:
		r.delayed()
	case <-r.watching.quiet.C: // watch reports the state
	case <-r.watching.answered:
		r.watching.stopKnocking()
		r.machine.Verify()
		r.dialNow()
	case s := <-r.cfg.Sleep:
		r.sleepReported(s)
	case <-r.stopping.requested:
		r.beginStop()
	case refuses := <-r.stopping.served:
		r.reportServed(refuses)
	case <-r.lost:
		r.look = true
	case err := <-r.keepFailed:
		return true, err
	case a := <-r.requests:
		r.requested(a)
	}
	return false, nil
}

// delayed reports a late flight to the machine.
func (r *runner) delayed() {
	if r.machine.InFlight() {
		r.machine.Delayed()
		r.watching.delayed.Reset(delayedAfter)
	}
}

// report reports the state of the machine after a step.
func (r *runner) report() {
	counts, incarnation := r.machine.Counts(), r.machine.Incarnation()
	if r.cfg.Sleep != nil && counts.Taken != r.taken {
		r.taken, r.takenAt = counts.Taken, time.Now()
	}
	r.span.begun(incarnation)
	r.cfg.Control.stepped(incarnation, counts)
	_, bytes := r.machine.Queued()
	r.cfg.Observer.Stepped(counts, bytes)
}

// checkIdle requests missed messages from a silent engine.
func (r *runner) checkIdle(now time.Time) {
	if r.speakers.tick(now) {
		r.replaceEngine(now)
	}
	r.reportSpeakers()
	wait := r.cfg.IdleCheck - now.Sub(r.heardAt)
	if wait <= 0 {
		r.machine.Verify()
		wait = r.cfg.IdleCheck
	}
	r.check.Reset(wait)
}

// publish writes one flight to the log. After a refusal it reads the last published state from the log.
func (r *runner) publish(ctx context.Context, flight [][]byte) {
	var f flushed
	publishing, span := r.cfg.Tracer.Produce(ctx, "shim.batch")
	last, err := r.cfg.Log.Publish(publishing, flight)
	r.traced(span, flight, last, err)
	switch {
	case err == nil:
		f.last = last
	case ctx.Err() != nil:
		return
	case errors.Is(err, ErrFenced):
		f.outcome = flightFenced
		if f.present, f.err = r.recover(ctx); f.err == nil && !f.present.Shutdown &&
			f.present.Unreadable == nil {
			f.err = err
		}
	case errors.Is(err, ErrLogLost):
		f.outcome = logRolledBack
		r.cfg.Observer.LogFailed(err)
		sleep(ctx, r.cfg.RetryMin)
		f.present, f.err = r.recover(ctx)
	default:
		f.err = err
	}
	r.giveFlushed(ctx, f)
}

// traced ends the span of a flight, if it has one.
func (r *runner) traced(span tracing.Span, flight [][]byte, last events.StreamSeq, err error) {
	if !span.On() {
		return
	}
	size := 0
	for _, m := range flight {
		size += len(m)
	}
	span.Set(attribute.String("messaging.system", "nats"), attribute.String("messaging.operation.type", "send"),
		attribute.String("messaging.operation.name", "publish"),
		attribute.Int("messaging.batch.message_count", len(flight)), attribute.Int("messaging.message.body.size", size),
		attribute.String("kvatlas.model", r.cfg.Identity.Model), attribute.Int64("kvatlas.log.sequence", int64(last)))
	switch {
	case err == nil:
	case errors.Is(err, ErrFenced):
		span.Fail("fenced", true)
	case errors.Is(err, ErrLogLost):
		span.Fail("log_lost", true)
	default:
		span.Fail("unavailable", true)
	}
	span.End()
}

// lookIntoLog reads the log, because another process may have closed the incarnation.
func (r *runner) lookIntoLog(ctx context.Context) {
	f := flushed{outcome: logRead}
	f.present, f.err = r.recover(ctx)
	r.giveFlushed(ctx, f)
}

// giveFlushed passes the result of a flight or of a read of the log to the loop.
func (r *runner) giveFlushed(ctx context.Context, f flushed) {
	if ctx.Err() != nil { // the content of the log is unknown
		return
	}
	if f.outcome != flightStored {
		f.last = f.present.Seq
	}
	select {
	case r.flushes <- f:
	case <-ctx.Done():
	}
}

// landed handles the result of a flight or of a read of the log.
func (r *runner) landed(f flushed) error {
	r.looking = r.looking && f.outcome != logRead
	if f.err != nil {
		return f.err
	}
	r.span.lastSeq = f.last
	switch {
	case f.outcome == flightStored:
		r.machine.Flushed()
		r.cfg.Observer.Published(r.machine.Acked().Cursor, f.last)
	case f.outcome == logRolledBack:
		r.logLost(f.present)
	case f.present.Unreadable != nil:
		r.logUnreadable(f.present)
	case f.present.Shutdown:
		r.machine.Ended(f.present, millis(time.Now()))
	}
	if f.outcome == logRead && !r.look { // a later request needs a later read
		r.answerWaiting(f.present)
	}
	return nil
}

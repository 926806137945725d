package shim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/kvatlas/kvatlas/internal/base/hooks"
	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// The errors that a Log tells apart, by what is done next.
var (
	// ErrFenced: somebody else publishes for the same (instance, rank). Run returns it; find the other shim.
	ErrFenced = errors.New("another shim publishes for this worker and rank")

	// ErrUnusable: the log, or what is in it, is not for this shim. Run returns it; a person must act.
	ErrUnusable = errors.New("the log cannot be used")

	// ErrLogLost: what the log had acknowledged is gone. Run begins a new incarnation with what the engine can say
	// again.
	ErrLogLost = errors.New("the log has lost what it had acknowledged")
)

// Log is where one rank's batches go. Run uses it from one goroutine at a time.
type Log interface {
	// Last returns what the log holds of this rank, from whichever shim.
	Last(ctx context.Context) (Published, error)

	// Publish appends messages, in order, and returns the place of the last when all are in the log. It tries until
	// then, and clears up by itself what became of an attempt that nobody answered. The error wraps ErrFenced or
	// ErrLogLost, or is ctx's; another one ends Run.
	Publish(ctx context.Context, msgs [][]byte) (events.StreamSeq, error)
}

// Receiver is a source of the messages of a ZeroMQ socket: a [zmtp.Sub] or a [zmtp.Inbox].
type Receiver interface {
	// Ready has an element when TryRecv may return a message, or the error of the end.
	Ready() <-chan struct{}

	// TryRecv returns the next message. ok is false if none waits.
	TryRecv() (m zmtp.Message, ok bool, err error)
}

// Config is one shim's.
type Config struct {
	Engine string // the engine's PUB endpoint, tcp:// or ipc://
	Listen bool   // Engine is where to listen: the engine dials in
	Replay string // the engine's replay endpoint; empty if it has none
	Topics []string

	// Messages, if not nil, is where the engine's messages come from in place of a socket of its own: they are one
	// engine's part of a socket at which several engines publish. Engine then only names the socket. After TryRecv's
	// error, when all that came is in the log, Run returns nil.
	Messages Receiver

	// Feed, if not nil, is where the engine's messages come from instead: the five fields above are not used, nor is
	// Decoder for those that were read already. When it is closed and all of it is in the log, Run returns nil.
	Feed <-chan Frame

	// Source, if not nil, is asked for what a feed has missed.
	Source Source

	Identity Identity
	Limits   Limits
	Decoder  Decoder

	// ClearUnreadable has a message that Decoder refuses count as one that is missing: what the rank was known to hold
	// is cleared. Else it costs itself alone. An engine that gives snapshots is asked for one when it says nothing for
	// a while.
	ClearUnreadable bool

	Log     Log
	Control *ControlServer // answers what others ask; nil if nobody can

	// Keep, if not nil, holds the rank's lease until ctx ends, and calls lost when the lease may have expired: then the
	// log is looked into. An error ends Run.
	Keep func(ctx context.Context, lost func()) error

	// ReplayTimeout is how long the replay socket may say nothing before the replay counts as failed. Default 2 s:
	// engines answer within a tenth of one.
	ReplayTimeout time.Duration

	// IdleCheck is after how long a silence the replay socket is asked whether anything was missed: an engine that
	// drops its last message and then says nothing shows no gap. Default 30 s. After a new connection it is asked
	// twice: at once, and a second later, when the engine is sure to have our subscription.
	IdleCheck time.Duration

	// RetryMin and RetryMax bound the pause after the log or the replay socket failed; it doubles in between, with
	// jitter. Defaults 100 ms and 5 s. While the engine's host refuses, and so can be reached, RetryReachable takes
	// RetryMax's place: default 500 ms.
	RetryMin, RetryMax, RetryReachable time.Duration

	// OnRefused is what follows when the engine's connection has ended and its own ports refuse, Engine's (without
	// Listen) and Replay's.
	OnRefused OnRefused

	// SilentAfter is after how long without a sign of life the engine counts as silent: heartbeats that are not
	// answered, for who speaks ZMTP 3.1, and no connection. Default 10 s. It proves nothing of what the engine holds.
	SilentAfter time.Duration

	// GoneAfter is after how much longer a silent engine counts as gone, and what it had in memory is cleared. Default
	// 0: never.
	GoneAfter time.Duration

	// QuietAfter is after how long without a first message, since the first connection, the engine counts as quiet. An
	// engine whose earlier messages are in the log has published before. Default 30 s.
	QuietAfter time.Duration

	// Stop, if not nil, is closed when the shim is to stop in good order. Run goes on, and returns nil when the engine is
	// gone and the log has all of it. The caller ends ctx when it waits no longer for the engine.
	Stop <-chan struct{}

	// Serving is where the engine takes requests, HOST:PORT. Run connects to it twice a second to see whether it still
	// accepts. Empty: it is not watched.
	Serving string

	// Sleep, if not nil, is where reports come from whether the engine sleeps. What a sleeping engine held is cleared.
	Sleep <-chan SleepReport

	Tracer *tracing.Tracer // of what is published; nil: that is not traced

	Sockets zmtp.Config // bounds of the engine's sockets; its hooks are Run's
	Hooks   Hooks
}

// Hooks tell what happens, from Run's goroutines. Each may be nil. They must not block.
type Hooks struct {
	Connected    func(endpoint string)
	Disconnected func(endpoint string, err error)
	Failed       func(endpoint string, err error) // no connection came about
	Stray        func(frames int)                 // a message on the engine's socket that is none of an engine's

	// Several tells that several engines publish where one is expected, and which is followed; empty: one does again.
	Several func(what string)

	Undecodable  func(seq events.EngineSeq, err error)
	ReplayFailed func(from events.EngineSeq, err error)
	ReplayEnded  func() // well: the replay socket has answered

	// SnapshotFailed is called with the error of a request to Source for all that the engine holds.
	SnapshotFailed func(err error)
	LogFailed      func(err error)
	LogUnreadable  func(err error) // the rank's last message in the log: a new incarnation begins
	Published      func(cursor events.Cursor, last events.StreamSeq)
	Stepped        func(Counts, int) // after each step: the counts, and the bytes that are queued
	StateChanged   func(State)       // how it stands has changed; the first time when Run's loop begins

	// Unserved tells why the engine accepts no requests any more; empty: it accepts them again.
	Unserved func(why string)
}

// runner is one Run: the machine and what waits around it. Its loop owns the machine.
type runner struct {
	cfg      Config
	machine  *Machine
	sub      *zmtp.Sub
	speakers speakers
	several  string // what Hooks.Several was told

	messages Receiver     // the engine's live socket; nil: there is a feed, or the messages have ended
	feed     <-chan Frame // nil: there is a socket, or the feed has ended
	flushes  chan flushed
	replay   replay // the one that runs, if one does
	snapshot conversation[snapshotted]
	lesson   conversation[*knowledge]
	retry    *time.Timer
	check    *time.Timer // when to ask whether anything was missed
	watching watching
	stopping stopping

	lost    chan struct{} // the lease may have expired
	kept    chan error    // the lease cannot be held
	look    bool          // look into the log as soon as nothing is in the air
	looking bool
	waiting []request // who waits for a look into the log
	span    span
	heardAt time.Time // when the engine last said something
	taken   uint64    // messages of the engine that the machine had taken at takenAt
	takenAt time.Time
	skips   events.SkipCounts // that the control server was told of
	ended   bool              // the messages, or the feed, have ended
}

type flushed struct {
	outcome outcome
	last    events.StreamSeq // of the rank's messages in the log
	present Published        // what the log holds, unless the flight is stored
	err     error            // the shim cannot go on
}

type outcome uint8

const (
	flightStored  outcome = iota // all of it is in the log
	flightFenced                 // somebody else has published: another shim, or who saw the lease expire
	logRolledBack                // the log has lost what it had acknowledged
	logRead                      // there was no flight
)

// Run shims one rank until ctx ends (it returns nil) or the shim cannot go on: ErrFenced, or an endpoint that makes no
// sense.
func Run(ctx context.Context, cfg Config) error {
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
	hooks.Fill(&cfg.Hooks)
	r := &runner{
		cfg:     cfg,
		flushes: make(chan flushed, 1),
		retry:   time.NewTimer(time.Hour),
		check:   time.NewTimer(cfg.IdleCheck),
		lost:    make(chan struct{}, 1),
		kept:    make(chan error, 1),
	}
	cfg.Control.begin(&cfg)
	r.watching = newWatching(&cfg, time.Now())
	r.stopping = stopping{requested: cfg.Stop, served: make(chan bool)}
	defer r.watching.tick.Stop()
	defer r.watching.delayed.Stop()
	defer r.watching.quiet.Stop()
	defer r.check.Stop()
	defer r.retry.Stop()
	r.retry.Stop()
	replay := cfg.Replay != ""
	if cfg.Feed != nil {
		replay = cfg.Source != nil
	}
	r.machine = NewMachine(cfg.Identity, cfg.Limits, replay, observed{r})
	if cfg.Feed != nil && replay {
		r.machine.UseSnapshots()
	}
	if cfg.ClearUnreadable {
		r.machine.ClearUnreadable()
	}

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	switch {
	case cfg.Feed != nil:
		r.feed = cfg.Feed
	case cfg.Messages != nil:
		r.messages = cfg.Messages
	default:
		sockets := cfg.sockets()
		sockets.Hooks = zmtp.Hooks{
			Failed: func(_ zmtp.Peer, err error) { cfg.Hooks.Failed(cfg.Engine, err) },
		}
		open := zmtp.DialSub
		if cfg.Listen {
			open = zmtp.ListenSub
		}
		var err error
		if r.sub, err = open(ctx, cfg.Engine, cfg.Topics, sockets); err != nil {
			return fmt.Errorf("engine endpoint: %w", err)
		}
		defer r.sub.Stop()
		r.messages = r.sub
	}
	published, err := r.recover(ctx)
	if err != nil || ctx.Err() != nil {
		return err
	}
	r.machine.Recovered(published, millis(time.Now()))
	if published.Unreadable != nil {
		cfg.Hooks.LogUnreadable(published.Unreadable)
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

func (r *runner) keep(ctx context.Context) {
	err := r.cfg.Keep(ctx, func() {
		loop.Wake(r.lost)
	})
	if err != nil {
		r.kept <- err
	}
}

func millis(t time.Time) events.Millis { return events.Millis(t.UnixMilli()) }

// observed is the configured decoder, with the Undecodable hook.
type observed struct{ *runner }

func (o observed) Decode(payload []byte) (events.Message, error) {
	msg, err := o.cfg.Decoder.Decode(payload)
	o.look(err)
	return msg, err
}

// Begin decodes all of a message if the configured decoder has no parts.
func (o observed) Begin(payload []byte) (msg events.Message, more bool, err error) {
	if d, ok := o.cfg.Decoder.(PartDecoder); ok {
		msg, more, err = d.Begin(payload)
	} else {
		msg, err = o.cfg.Decoder.Decode(payload)
	}
	o.look(err)
	return msg, more, err
}

func (o observed) Continue() (part []events.Event, more bool) {
	part, more = o.cfg.Decoder.(PartDecoder).Continue() // Begin reported more
	o.look(nil)
	return part, more
}

// look passes on what the decoder has found out.
func (o observed) look(err error) {
	if err != nil {
		o.cfg.Hooks.Undecodable(o.machine.Taken().Seq, err)
	}
	if d, ok := o.cfg.Decoder.(interface{ Counts() events.SkipCounts }); ok && o.cfg.Control != nil {
		if now := d.Counts(); now != o.skips {
			o.runner.skips = now
			o.cfg.Control.hear(func(h *engineHeard) { h.skips = now })
		}
	}
}

func (o observed) Reset() {
	if o.cfg.Decoder != nil {
		o.cfg.Decoder.Reset()
	}
}

func (o observed) Cleared() {
	if c, ok := o.cfg.Decoder.(Clearer); ok {
		c.Cleared()
	}
}

func (o observed) Blank() *events.Decoder {
	if l, ok := o.cfg.Decoder.(Learner); ok {
		return l.Blank()
	}
	return nil
}

func (o observed) Adopt(d *events.Decoder) { o.cfg.Decoder.(Learner).Adopt(d) }

// recover asks the log, for as long as it takes, what it holds of this rank.
func (r *runner) recover(ctx context.Context) (Published, error) {
	pause := r.cfg.RetryMin
	for {
		p, err := r.cfg.Log.Last(ctx)
		if err == nil || errors.Is(err, ErrUnusable) {
			return p, err
		}
		if ctx.Err() != nil {
			return p, nil
		}
		r.cfg.Hooks.LogFailed(err)
		sleep(ctx, pause)
		pause = min(2*pause, r.cfg.RetryMax)
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
		r.heard(msg)
	case err != nil:
		r.messages, r.ended = nil, true
	}
}

// fed handles the next frame of the feed, or its end.
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

// feedOpened has the source asked at once, and a second later, when it is sure to have the feed's subscription.
func (r *runner) feedOpened() {
	r.machine.Verify()
	r.heardAt = time.Time{}
	r.check.Reset(min(r.cfg.IdleCheck, time.Second))
}

func (r *runner) loop(ctx context.Context) error {
	var requests chan request
	if r.cfg.Control != nil {
		requests = r.cfg.Control.requests
	}
	for {
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
		if entries, _ := r.machine.Queued(); entries == 0 && (r.ended || r.hasStopped()) {
			return nil
		}
		feed, replayed, snapshotted, lesson, nextReplayed := r.feed, r.replay.out, r.snapshot.out, r.lesson.out,
			r.replay.pace.due()
		var messages <-chan struct{}
		if r.messages != nil {
			messages = r.messages.Ready()
		}
		if r.machine.Full() {
			messages, feed, replayed, snapshotted, lesson, nextReplayed = nil, nil, nil, nil, nil, nil
		}
		r.watch(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-messages:
			r.receive()
		case f, ok := <-feed:
			r.fed(f, ok)
		case got := <-replayed:
			r.replay.pace.received(got.frame.size())
			r.replayed(ctx, got)
		case <-nextReplayed:
			r.replay.pace.owed = false
		case got := <-snapshotted:
			r.snapshotted(got)
		case k := <-lesson:
			r.lesson.end()
			r.machine.Learned(k)
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
			if r.machine.InFlight() {
				r.machine.Delayed()
				r.watching.delayed.Reset(delayedAfter)
			}
		case <-r.watching.quiet.C: // watch looks at it
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
		case f := <-r.flushes:
			if err := r.landed(f); err != nil {
				return err
			}
		case <-r.lost:
			r.look = true
		case err := <-r.kept:
			return err
		case a := <-requests:
			if a.lost {
				r.waiting, r.look = append(r.waiting, a), true
				break
			}
			r.machine.Resync(millis(time.Now()))
			a.begun <- r.machine.Incarnation()
		}
		if n := r.machine.Counts().Taken; r.cfg.Sleep != nil && n != r.taken {
			r.taken, r.takenAt = n, time.Now()
		}
		r.span.begun(r.machine.Incarnation())
		r.cfg.Control.stepped(r.machine.Incarnation(), r.machine.Counts())
		_, bytes := r.machine.Queued()
		r.cfg.Hooks.Stepped(r.machine.Counts(), bytes)
	}
}

// checkIdle asks whether anything was missed if the engine has been silent.
func (r *runner) checkIdle(now time.Time) {
	r.speakers.tick(now)
	r.reportSpeakers()
	wait := r.cfg.IdleCheck - now.Sub(r.heardAt)
	if wait <= 0 {
		r.machine.Verify()
		wait = r.cfg.IdleCheck
	}
	r.check.Reset(wait)
}

// publish carries one flight to the log, and finds out what the log holds if it does not take that.
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
		r.cfg.Hooks.LogFailed(err)
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

// lookIntoLog finds out whether the incarnation was closed.
func (r *runner) lookIntoLog(ctx context.Context) {
	f := flushed{outcome: logRead}
	f.present, f.err = r.recover(ctx)
	r.giveFlushed(ctx, f)
}

func (r *runner) giveFlushed(ctx context.Context, f flushed) {
	if f.outcome != flightStored {
		f.last = f.present.Seq
	}
	select {
	case r.flushes <- f:
	case <-ctx.Done():
	}
}

func (r *runner) landed(f flushed) error {
	r.looking = r.looking && f.outcome != logRead
	if f.err != nil {
		return f.err
	}
	r.span.lastSeq = f.last
	switch {
	case f.outcome == flightStored:
		r.machine.Flushed()
		r.cfg.Hooks.Published(r.machine.Acked().Cursor, f.last)
	case f.outcome == logRolledBack:
		r.logLost(f.present)
	case f.present.Unreadable != nil:
		r.logUnreadable(f.present)
	case f.present.Shutdown:
		r.machine.Ended(f.present, millis(time.Now()))
	case f.outcome == logRead:
		r.resyncIfLost(f.present)
	}
	if f.outcome == logRead {
		r.answerRequests()
	}
	return nil
}

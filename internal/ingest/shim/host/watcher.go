package host

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// watcher logs the events of a rank's shim at a bounded rate, and counts the skipped events of the decoder.
type watcher struct {
	Unobserved
	log *slog.Logger
	cfg *Shim
	*shim.Examiner

	report  *shim.Report
	last    shim.State        // already logged
	skipped events.SkipCounts // already logged
	several bool              // already logged
	groups  hicache.Observed  // of the store, if --l3-config has none
	counts  shim.Counts       // already logged

	connectedOnce sync.Once

	connected, replays atomic.Bool // the event endpoint had a connection; the replay endpoint has answered

	failed, stray, undecodable, skips, replayFailed, snapshotFailed, logTrouble, unreadable, otherRank,
	credited, leaseTrouble Limiter
}

// newWatcher returns the watcher of a rank.
func newWatcher(cfg *Shim, log *slog.Logger) *watcher {
	w := &watcher{log: log, cfg: cfg}
	for _, l := range []*Limiter{&w.failed, &w.stray, &w.undecodable, &w.skips, &w.replayFailed, &w.snapshotFailed,
		&w.logTrouble, &w.unreadable, &w.otherRank, &w.credited, &w.leaseTrouble} {
		l.Every = cfg.LogRepeat
	}
	return w
}

// Examine returns the watcher as the decoder, in place of an examiner.
func (w *watcher) Examine(x *shim.Examiner) shim.Decoder {
	w.Examiner = x
	return w
}

func (w *watcher) Found(e events.Engine, why string) {
	w.log.Info("the engine speaks as "+e.String()+" does", "because", why)
}

func (w *watcher) Unusable(err error, size uint32) (remedy string, skip bool) {
	if err != nil && w.cfg.proof != nil && size > w.cfg.BlockSize && size%w.cfg.BlockSize == 0 {
		w.cfg.proof.report(size)
		return "", true
	}
	remedy = wrongBlockSize(size, events.WorkerID(w.cfg.Worker), w.cfg.Model)
	if err != nil {
		w.log.Error("the engine's blocks are not of --block-size", "error", err, "what_to_do", remedy)
	} else {
		w.log.Info("the engine's blocks are of --block-size, or a new engine begins")
	}
	return remedy, false
}

func (w *watcher) OtherRank(rank events.Rank, skipped bool) {
	l, what := &w.credited, "the engine's messages name a different data-parallel rank; the blocks are credited to "+
		"this rank"
	if skipped {
		l, what = &w.otherRank,
			"several data-parallel ranks publish through one socket; only the events of this rank are used"
	}
	l.Do(func(times uint64) {
		w.log.Error(what, "engine_rank", rank, "times", times, "what_to_do",
			"give this shim the rank with --rank, or the endpoint of the right rank with --engine")
	})
}

// Begin decodes the first part of a message, and counts the skipped events.
func (w *watcher) Begin(payload []byte) (msg events.Message, more bool, err error) {
	msg, more, err = w.Examiner.Begin(payload)
	w.countSkips()
	w.proveSize(msg.Events)
	w.learnGroups(msg.Events)
	return msg, more, err
}

// Continue decodes the next part, and counts the skipped events.
func (w *watcher) Continue() (part []events.Event, more bool) {
	part, more = w.Examiner.Continue()
	w.countSkips()
	w.proveSize(part)
	w.learnGroups(part)
	return part, more
}

// proveSize examines events while the block size is nominal.
func (w *watcher) proveSize(list []events.Event) {
	if w.cfg.proof != nil {
		w.cfg.proof.examine(list, w.cfg.BlockSize)
	}
}

// countSkips reports newly skipped events in the log and the figures.
func (w *watcher) countSkips() {
	if now := w.Counts(); now != w.skipped {
		w.skips.Do(func(uint64) {
			for s := range now {
				if n := now[s] - w.skipped[s]; n > 0 {
					w.log.Warn("events passed over", "reason", events.Skip(s).String(), "times", n)
				}
			}
			w.skipped = now
		})
		w.cfg.Figures.update(w, func(r *rankFigures) { r.skipped = now })
	}
}

// wrongBlockSize returns the remedy for blocks of another size. The wrong size stays registered for the model until an
// operator removes it.
func wrongBlockSize(got uint32, worker events.WorkerID, model string) string {
	size := "N, the size of the engine's blocks"
	if got > 0 {
		size = fmt.Sprint(got)
	}
	return fmt.Sprintf("stop this shim and start worker-shim with --block-size %s; if the model then has a "+
		"different registered size: indexer workers clear %s, then indexer models remove %s", size,
		escape.Operand(string(worker)), escape.Operand(model))
}

// Advice returns the remedy for a failed shim of an engine.
func Advice(err error, worker events.WorkerID, model string) string {
	switch {
	case errors.Is(err, jetstream.ErrMismatch):
		return wrongBlockSize(0, worker, model)
	case errors.Is(err, shim.ErrFenced):
		return "stop the other shim of this worker, or give the engine another topic"
	case errors.Is(err, jetstream.ErrDenied):
		return "permit the shim's NATS user every worker and model: indexer auth create --pool NAME --model " +
			escape.Shell(model)
	}
	return "see the error"
}

func (w *watcher) Refused(err error, _ bool) {
	w.cfg.Figures.update(w, func(r *rankFigures) { r.refused = true })
	w.logTrouble.WarnTo(w.log, "the log does not accept events; the events wait", "error", err, "what_to_do",
		shim.LogAdvice(err))
}

// Crowded logs refused batches, and the end of this state.
func (w *watcher) Crowded(err error, changed bool) {
	if err != nil {
		w.cfg.Figures.update(w, func(r *rankFigures) { r.crowded++ })
	}
	switch {
	case changed && err != nil:
		w.log.Warn("the log refuses batches; events are stored separately", "error", err, "what_to_do",
			shim.CrowdedAdvice)
	case changed:
		w.log.Info("the log accepts batches again")
	}
}

// LogResumed logs the end of refusals.
func (w *watcher) LogResumed() { w.log.Info("the log accepts events again") }

// Denied logs the run without a lease: the blocks of the rank stay after the rank's end.
func (w *watcher) Denied(err error) bool {
	w.log.Warn("the NATS server does not permit registration; indexers will not notice the end of this worker", "error",
		err, "what_to_do", "grant the permission to this user: indexer auth create prints the permissions of all "+
			"users")
	return true
}

func (w *watcher) Connected(endpoint string) {
	w.log.Info("connected to the engine", "endpoint", endpoint)
	w.connected.Store(true)
	w.connectedOnce.Do(w.firstConnected)
}

func (w *watcher) Disconnected(endpoint string, err error) {
	again := "the shim dials until the engine answers"
	if w.cfg.Listen {
		again = "the engine dials the shim after a restart"
	}
	w.log.Warn("the engine's connection has ended", "endpoint", endpoint, "error", err, "what_to_do",
		"check whether the engine runs; "+again)
}

func (w *watcher) Failed(endpoint string, err error) {
	w.failed.WarnTo(w.log, "cannot connect to the engine", "endpoint", endpoint, "error", err, "what_to_do",
		w.advice(err, eventEndpoint, &w.connected))
}

func (w *watcher) Stray(frames int) {
	w.stray.WarnTo(w.log, "received a message that is no engine event; check the port", "frames", frames)
}

func (w *watcher) Undecodable(seq events.EngineSeq, err error) {
	w.undecodable.Do(func(n uint64) {
		what := "passed over"
		if w.cfg.OnUnreadable == UnreadableClear {
			what = "the rank's holdings are cleared"
		}
		w.log.Warn("engine message cannot be decoded; "+what, "seq", seq, "error", err, "times", n)
	})
}

func (w *watcher) ReplayFailed(from events.EngineSeq, err error) {
	w.replayFailed.WarnTo(w.log, "replay failed", "from", from, "error", err, "what_to_do",
		w.advice(err, replayEndpoint, &w.replays))
}

func (w *watcher) ReplayEnded() { w.replays.Store(true) }

func (w *watcher) SnapshotFailed(err error) {
	w.snapshotFailed.WarnTo(w.log, "the engine gave no snapshot", "error", err, "what_to_do",
		"check that the worker answers at the address in Dynamo's discovery; the shim requests the snapshot again")
}

func (w *watcher) LogUnreadable(err error) {
	w.unreadable.WarnTo(w.log, "the rank's last message in the log cannot be read; a new incarnation begins", "error",
		err, "what_to_do", "check that only this worker's shim has a key that may write its events")
}

func (w *watcher) Unserved(why string) {
	if why == "" {
		w.log.Info("the engine accepts requests again")
		return
	}
	w.log.Info("the engine accepts no requests any more and is not chosen", "why", why)
}

// Several logs that several engines publish at a single socket, and the end of this state.
func (w *watcher) Several(what string) {
	if several := what != ""; several == w.several {
		return
	}
	if w.several = what != ""; w.several {
		w.log.Error("several engines publish to this shim; a single engine is followed, and further engines are "+
			"skipped", "engines", what, "what_to_do", shim.SeveralAdvice)
		return
	}
	w.log.Info("one engine publishes to this shim again")
}

// StateChanged logs and counts a change in the state of the shim or the engine.
func (w *watcher) StateChanged(s shim.State) {
	w.cfg.Figures.update(w, func(r *rankFigures) { r.state = s })
	if w.last.Quiet != s.Quiet {
		w.logQuiet(s)
	}
	if before := w.last; before.CatchingUp && !s.CatchingUp && s.Engine != api.EngineGone {
		w.log.Info("caught up: the log has the engine's earlier events")
	}
	before := w.last.Engine
	w.last = s
	if s.Engine == before {
		return
	}
	if w.cfg.watch != nil {
		w.cfg.watch.changed(before, s.Engine)
	}
	switch s.Engine {
	case api.EngineSilent:
		keeps := "nothing is cleared, since the engine may still hold all blocks; see --engine-gone-after"
		if w.cfg.GoneAfter > 0 {
			keeps = "the engine's blocks are cleared after --engine-gone-after " + w.cfg.GoneAfter.String()
		}
		w.log.Warn("the engine is silent", "since", s.Since.UTC().Format(time.RFC3339), "why", s.Why, "what_to_do",
			hungAdvice+"; "+keeps)
	case api.EngineAsleep:
		w.log.Info("the engine sleeps; all blocks are cleared, and the engine is not chosen until the end of the sleep")
	case api.EngineConnected:
		if before == api.EngineAsleep {
			w.log.Info("the engine is awake")
		}
	case api.EngineGone:
		w.log.Warn("the engine is gone; the blocks in device and host memory are cleared", "why", s.Why)
	}
}

// hungAdvice is the remedy for an engine without answers.
const hungAdvice = "check whether the engine's process hangs or is stopped (py-spy dump, the log), " +
	"and whether the host is reachable; restart the engine if it does not go on"

// Stepped logs losses and new incarnations when the counts grow.
func (w *watcher) Stepped(c shim.Counts, queued int) {
	w.cfg.Figures.update(w, func(r *rankFigures) {
		r.refused = r.refused && c.Messages == r.counts.Messages
		r.counts, r.queued = c, queued
	})
	if c.Gaps > w.counts.Gaps {
		w.log.Warn("missing engine messages could not be replayed; the rank's holdings are cleared", "times",
			c.Gaps)
	}
	if c.Snapshots > w.counts.Snapshots {
		w.log.Info("a snapshot of the engine replaces messages that could not be replayed", "snapshots", c.Snapshots)
	}
	if c.Corrections > w.counts.Corrections {
		w.log.Info("blocks are published again, with the salts of an earlier shim", "events", c.Corrections)
	}
	if c.Resyncs > w.counts.Resyncs {
		w.log.Warn("a node requested the engine's holdings again", "times", c.Resyncs)
	}
	if c.Incarnations > w.counts.Incarnations {
		w.log.Info("a new incarnation of the engine begins", "incarnations", c.Incarnations)
	}
	if c.JoinedLate > w.counts.JoinedLate {
		w.log.Warn("the engine has published messages before and has no replay; its earlier blocks are unknown",
			"times", c.JoinedLate)
	}
	w.counts = c
}

// firstConnected checks the settings at the first connection.
func (w *watcher) firstConnected() {
	if w.cfg.Replay == "" && w.cfg.Messages == nil {
		w.log.Warn("no replay endpoint: the engine's earlier events are unknown, and every gap clears the rank",
			"what_to_do", "set replay_endpoint in the engine's --kv-events-config and set --replay to the endpoint")
	}
}

// logQuiet logs that a connected engine has published nothing, or that its first message has arrived.
func (w *watcher) logQuiet(s shim.State) {
	if !s.Quiet {
		w.log.Info("the engine has published its first event")
		return
	}
	w.log.Warn("connected, and the engine has published nothing", "for", w.cfg.Silence, "what_to_do", w.silenceAdvice())
}

// silenceAdvice returns possible causes for a connected engine that publishes nothing.
func (w *watcher) silenceAdvice() string {
	var do []string
	if w.cfg.Topic != "" {
		do = append(do, "no message's topic begins with --topic "+
			""+w.cfg.Topic+"; without --topic, the shim receives all messages")
	}
	if w.cfg.QuietAdvice != "" {
		do = append(do, w.cfg.QuietAdvice)
	}
	vllm, sglang := `"enable_kv_cache_events":true in --kv-events-config and with prefix caching`,
		`"publisher":"zmq" in --kv-events-config and without --disable-radix-cache`
	switch {
	case w.cfg.QuietAdvice != "":
	case w.cfg.Source == "sglang":
		do = append(do, "check that the engine was started with "+sglang)
	case w.cfg.Source == "vllm":
		do = append(do, "check that the engine was started with "+vllm)
	default:
		do = append(do, "check that the engine was started with "+vllm+" (vLLM), or with "+sglang+" (SGLang)")
	}
	return strings.Join(append(do, "or send it a request: an engine without load publishes nothing"), "; ")
}

// endpoint describes an endpoint of an engine in advice.
type endpoint struct {
	is      string // the right value of the flag
	refuses string // possible causes if nothing listens there
	other   string // socket type of the endpoint for mixed
	mixed   string // owner of a port with a socket of type other
}

var (
	eventEndpoint = endpoint{
		is: "--engine is the endpoint in the engine's --kv-events-config",
		refuses: "check that the engine runs, publishes events, and binds this port; " +
			"an engine with a host name in the endpoint dials out and needs --listen",
		other: `"ROUTER"`, mixed: "the engine's replay endpoint, perhaps: --engine and --replay exchanged",
	}
	replayEndpoint = endpoint{
		is: "--replay is the replay_endpoint in the engine's --kv-events-config",
		refuses: "check that the engine runs and has a replay_endpoint with this port in --kv-events-config; " +
			"without a replay_endpoint, leave --replay out",
		other: `PUB"`, mixed: "the engine's event publisher, perhaps: --engine and --replay exchanged",
	}
)

// advice returns the remedy for a failed connection to the engine. known means that the endpoint has worked before.
// Then the settings are right, and the engine has changed.
func (w *watcher) advice(err error, to endpoint, known *atomic.Bool) string {
	switch {
	case !known.Load():
	case errors.Is(err, zmtp.ErrSilent):
		return "the engine answered there before and does not any more: " + hungAdvice
	case zmtp.Refuses(err):
		return "the engine answered there before and nothing listens now: the engine has ended or restarts; " +
			"the shim connects as soon as the engine is back"
	}
	return advice(err, to)
}

// advice returns the remedy for an endpoint without any connection so far.
func advice(err error, to endpoint) string {
	switch refused, is := errors.AsType[*zmtp.RefusedError](err); {
	case is && refused.Mechanism != "":
		return "start the engine's event sockets without CURVE or PLAIN; keep the sockets on a separate network"
	case is:
		whose := map[string]string{"HTTP": "an HTTP server, perhaps the engine's API", "NATS": "a NATS server",
			"TLS": "a TLS server"}[refused.Protocol]
		if whose == "" && strings.Contains(refused.Reason, to.other) {
			whose = to.mixed
		}
		if whose != "" {
			return "this port belongs to " + whose + "; " + to.is
		}
		return "the port is no such endpoint of an engine; " + to.is
	case errors.Is(err, syscall.ECONNREFUSED):
		return "nothing listens there: " + to.refuses
	case errors.Is(err, zmtp.ErrSilent):
		return "the server there sends nothing, as HTTP and TLS servers do; " + to.is
	}
	return "check that " + to.is
}

package dump

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/usage"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

const (
	maxLine      = 64 << 20
	flushAt      = 4 << 20  // waiting bytes of one rank
	flushAllAt   = 64 << 20 // bytes of lines after which the events of all ranks are published
	firstMessage = events.EngineSeq(1 << 62)
)

// Loaded counts the lines of a file by outcome.
type Loaded struct {
	Lines   uint64            `json:"lines"`
	Ranks   int               `json:"ranks"`
	Events  uint64            `json:"events"`  // published events, including the clears of Load
	Blocks  uint64            `json:"blocks"`  // blocks in stored events
	Skipped map[string]uint64 `json:"skipped"` // lines without an effect, by unsupported feature
}

// Load publishes the lines of a file, with a new incarnation for each rank. The incarnation begins with a clear. Load
// claims ranks as a shim does, and refuses a rank with a live shim. The next shim of the rank begins a new incarnation.
// An error contains the line, and is a usage error for an invalid line; the events of earlier lines may be published.
// If worker is set, all lines belong to this worker and need no name: see [events.ReadWorkerEvents].
func Load(
	ctx context.Context, ns *jetstream.Namespace, in io.Reader, id shim.Identity, worker events.WorkerID,
) (Loaded, error) {
	l := loader{ns: ns, id: id, worker: worker,
		ranks: map[events.RankKey]*loading{}, out: Loaded{Skipped: map[string]uint64{}}}
	defer func() {
		for _, r := range l.ranks {
			r.server.Close()
		}
	}()
	if err := ns.RegisterModel(ctx, jetstream.Model{Name: id.Model, BlockSize: id.BlockSize}); err != nil {
		return l.out, err
	}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		l.out.Lines++
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		if err := l.load(ctx, lines.Bytes()); err != nil {
			return l.out, fmt.Errorf("line %d: %w", l.out.Lines, err)
		}
	}
	if err := lines.Err(); errors.Is(err, bufio.ErrTooLong) {
		return l.out, usage.Errorf("line %d: no router event: longer than %d bytes", l.out.Lines+1, maxLine)
	} else if err != nil {
		return l.out, fmt.Errorf("line %d: %w", l.out.Lines+1, err)
	}
	if err := l.flush(ctx); err != nil {
		return l.out, err
	}
	for _, r := range l.ranks {
		counts := r.machine.Counts()
		l.out.Events += counts.Events
		l.out.Blocks += counts.Blocks
	}
	l.out.Ranks = len(l.ranks)
	return l.out, nil
}

type loader struct {
	ns     *jetstream.Namespace
	id     shim.Identity
	worker events.WorkerID // worker of all lines; empty: every line names its worker
	ranks  map[events.RankKey]*loading
	out    Loaded
	taken  int // bytes of lines since the last complete flush
}

func (l *loader) flush(ctx context.Context) error {
	l.taken = 0
	for key, r := range l.ranks {
		if err := r.flush(ctx); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	return nil
}

// loading is one rank: a shim's machine with the file as its engine.
type loading struct {
	server  *shim.ControlServer
	log     *shim.StreamLog
	machine *shim.Machine
	decoded []events.Event // of the current line
	next    events.EngineSeq
}

// load processes a line.
func (l *loader) load(ctx context.Context, text []byte) error {
	var failed error // an error that the line did not cause
	_, err := events.ReadWorkerEvents(text, l.worker, func(e events.RouterEvent, text []byte) error {
		failed = l.publishEvent(ctx, e, text)
		return failed
	})
	if err != nil && failed == nil {
		return usage.Errorf("no router event: %w", err)
	}
	return failed
}

// publishEvent processes an event; text is its JSON.
func (l *loader) publishEvent(ctx context.Context, line events.RouterEvent, text []byte) (err error) {
	r := l.ranks[line.Key]
	if r == nil {
		if r, err = l.open(ctx, line.Key); err != nil {
			return err
		}
		l.ranks[line.Key] = r
	}
	if line.Skipped != "" {
		l.out.Skipped[line.Skipped]++
	}
	r.decoded = line.Events()
	r.machine.Live(shim.Frame{Seq: r.next, Payload: text}, 0)
	r.next++
	if _, waiting := r.machine.Queued(); waiting >= flushAt {
		return r.flush(ctx)
	}
	if l.taken += len(text); l.taken >= flushAllAt {
		return l.flush(ctx)
	}
	return nil
}

func (l *loader) open(ctx context.Context, key events.RankKey) (*loading, error) {
	server, err := shim.Claim(ctx, l.ns, key, false)
	if err != nil {
		return nil, err
	}
	// No engine uses these numbers, so the next shim detects another engine.
	r := &loading{server: server, log: shim.NewStreamLog(l.ns, key, nil), next: firstMessage}
	before, err := r.log.Last(ctx)
	if err != nil {
		server.Close()
		return nil, err
	}
	before.Cursor = events.Cursor{} // the cursor of the earlier shim is useless here
	r.machine = shim.NewMachine(l.id, shim.Limits{}, false, shim.Whole{Decode: r.decode})
	r.machine.Recovered(before, events.Millis(time.Now().UnixMilli()))
	err = registry.Claim(ctx, l.ns, key.Instance, l.id.Model)
	if err != nil && !errors.Is(err, jetstream.ErrDenied) { // a release without claims requires none
		server.Close()
		return nil, err
	}
	return r, nil
}

func (r *loading) flush(ctx context.Context) error {
	for {
		ready, err := r.machine.Advance(true)
		if err != nil || ready.Flight == nil {
			return err
		}
		if _, err := r.log.Publish(ctx, ready.Flight); err != nil {
			return err
		}
		r.machine.Flushed()
	}
}

// decode returns the events of the current line, which is already decoded.
func (r *loading) decode([]byte) (events.Message, error) {
	return events.Message{Events: r.decoded}, nil
}

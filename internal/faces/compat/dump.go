package compat

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// MaxDumps is how many dumps one node writes at a time.
const MaxDumps = 2

// dumpDeadline bounds the writing of a dump.
const dumpDeadline = 10 * time.Minute

// Dump is an answer that is written while it is read from the snapshots. Stream or Close must be called.
type Dump struct {
	cfg     *Config
	models  map[string]*dumped
	release func()
}

// dumped is what is dumped of a model.
type dumped struct {
	size    uint32
	workers []events.WorkerID
}

// Holdings has snapshots written and returns what they hold, for /dump: what the log said a moment ago.
func (cfg *Config) Holdings(ctx context.Context) (*Dump, error) {
	select {
	case cfg.Dumps <- struct{}{}:
	default:
		return nil, api.Errorf(api.CodeBusy, "%d dumps are under way, which is as many as a node writes at a time; "+
			"ask again when one has ended, or run indexer dump", cap(cfg.Dumps))
	}
	d := &Dump{cfg: cfg, models: map[string]*dumped{}, release: func() { <-cfg.Dumps }}
	if err := d.open(ctx); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

func (cfg *Config) dump(ctx context.Context, _ []byte, _ url.Values) (any, error) {
	d, err := cfg.Holdings(ctx)
	if err != nil {
		return nil, err
	}
	return d, nil
}

func (d *Dump) open(ctx context.Context) error {
	list, err := d.cfg.Server.Workers(ctx, api.WorkersRequest{})
	if err != nil {
		return err
	}
	if _, err := d.cfg.Server.Snapshot(ctx); err != nil {
		return err
	}
	grouped := map[string]bool{}
	for _, l := range d.cfg.Shims.Listeners() {
		grouped[l.Record.Model] = l.Record.Engine.Group != DefaultGroup
	}
	of := map[events.WorkerID]*dumped{}
	for _, w := range list.Workers {
		key := w.Model + ":" + DefaultGroup
		if grouped[w.Model] {
			key = w.Model
		}
		if d.models[key] == nil {
			d.models[key] = &dumped{size: w.BlockSize}
		}
		of[events.WorkerID(w.Instance)] = d.models[key]
	}
	for worker, model := range of {
		model.workers = append(model.workers, worker)
	}
	return nil
}

// Close lets another dump begin.
func (d *Dump) Close() {
	if d.release != nil {
		d.release()
		d.release = nil
	}
}

// Stream writes the dump as JSON, and closes it. It needs the memory of one partition's blocks. Of an error before the
// first byte the caller can still tell; begun says that it is too late for that.
func (d *Dump) Stream(ctx context.Context, w http.ResponseWriter) (begun bool, err error) {
	defer d.Close()
	ctx, cancel := context.WithTimeout(ctx, dumpDeadline)
	defer cancel()
	to := &begunWriter{w: w}
	out := bufio.NewWriterSize(to, 64<<10)
	if err = d.write(ctx, out); err == nil {
		err = out.Flush()
	}
	return to.begun, err
}

func (d *Dump) write(ctx context.Context, out *bufio.Writer) error {
	next := byte('{')
	for _, name := range slices.Sorted(maps.Keys(d.models)) {
		model := d.models[name]
		text, err := json.Marshal(name)
		if err != nil {
			return err
		}
		_ = out.WriteByte(next) // Flush returns an error of the writer's
		fmt.Fprintf(out, `%s:{"block_size":%d,"events":[`, text, model.size)
		if err := d.cfg.Dump(ctx, model.workers, &listWriter{out: out}); err != nil {
			return err
		}
		_, _ = out.WriteString("]}")
		next = ','
	}
	if next == '{' {
		_ = out.WriteByte('{')
	}
	return out.WriteByte('}')
}

// listWriter turns lines, each of which is written at once, into the elements of a list.
type listWriter struct {
	out   *bufio.Writer
	lines int
}

func (l *listWriter) Write(line []byte) (int, error) {
	if l.lines++; l.lines > 1 {
		_ = l.out.WriteByte(',')
	}
	_, err := l.out.Write(line[:len(line)-1])
	return len(line), err
}

// begunWriter writes the head of an answer with its first bytes.
type begunWriter struct {
	w     http.ResponseWriter
	begun bool
}

func (b *begunWriter) Write(p []byte) (int, error) {
	if !b.begun {
		b.begun = true
		b.w.Header().Set("Content-Type", api.JSON)
	}
	return b.w.Write(p)
}

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

// MaxDumps is the number of concurrent dumps of a node.
const MaxDumps = 2

// dumpDeadline is the time limit of a dump.
const dumpDeadline = 10 * time.Minute

// Dump streams the content of snapshots to the client. The caller must call Stream or Close.
type Dump struct {
	cfg     *Config
	models  map[string]*dumped
	release func()
}

// dumped is the part of a dump for a model.
type dumped struct {
	size    uint32
	workers []events.WorkerID
}

// Holdings requests new snapshots and returns a Dump of the contents for /dump. The dump includes all events in the log
// at the time of the call.
func (cfg *Config) Holdings(ctx context.Context) (*Dump, error) {
	select {
	case cfg.Dumps <- struct{}{}:
	default:
		return nil, api.Errorf(api.CodeBusy, "%d dumps are running, the maximum of a node; "+
			"retry after the end of a dump, or run indexer dump", cap(cfg.Dumps))
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

// Close frees the place for another dump.
func (d *Dump) Close() {
	if d.release != nil {
		d.release()
		d.release = nil
	}
}

// Stream writes the dump as JSON and closes the dump. Stream needs memory for the blocks of a single partition. begun
// reports that the first byte was written. After that an error cannot become a reply.
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
		_ = out.WriteByte(next) // Flush returns the error of the writer
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

// listWriter converts lines to the elements of a JSON list. Every Write call contains a single line.
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

// begunWriter writes the head of the reply before the first bytes.
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

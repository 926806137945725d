// Package bench measures the index (pkg/radix) on a corpus (tools/corpus) for the command `indexer bench index`.
//
// [RunIndex] runs a single mode:
//
//   - events: applies stores and removals as fast as possible, and reports blocks (stored and removed) per second. The
//     first pass fills an empty index. The second pass fills the same index after the removal of all ranks, so its
//     memory has been touched before.
//   - queries: applies all events, then runs every query of the corpus once without a clock. Then it runs every query
//     nine times, or more often for a total of 20,000 answers. The report has the time per query from hashes in memory
//     to depths in memory. A second figure uses the median time of every query, which excludes interruptions by the
//     machine. Then it measures queries per second without a clock in between. The options set the number of readers.
//   - mixed: runs all operations in the order of the file on a single goroutine, and reports the seconds and the digest
//     of all answers.
//   - load: applies the first half of the events. Then it runs queries while a writer applies the other half at full
//     speed, in a loop.
//   - memory: reports the resident bytes after all events and a garbage collection, minus the bytes before, for each
//     holding.
//   - snapshot: writes an image of all ranks to memory, reads the image, and clears every rank. The report has the
//     longest pause of the writer by a step.
//
// An index has a single writer. With several writers, every writer has an index with a part of the workers, and a query
// reads all indexes.
package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/tools/corpus"
)

// Mode is a kind of run.
type Mode string

// The modes.
const (
	Events   Mode = "events"
	Queries  Mode = "queries"
	Mixed    Mode = "mixed"
	Load     Mode = "load"
	Memory   Mode = "memory"
	Snapshot Mode = "snapshot"
)

// Modes lists the modes in the order of the package comment.
var Modes = []Mode{Events, Queries, Mixed, Load, Memory, Snapshot}

// Options configures a run.
type Options struct {
	File    string // a corpus
	Mode    Mode
	Writers int // default 1
	Readers int // default 1; of queries and load
	// tokens; gives every worker a sliding window beside the prefix and keeps the end of a store in the window; 0 disables
	// windows
	Window int
	JSON   bool // prints the report as a JSON object instead of text
	Index  radix.Config
}

// Validate returns all faults of the options.
func (o Options) Validate() error {
	var wrong []error
	if o.File == "" {
		wrong = append(wrong, errors.New("no corpus file"))
	}
	if !slices.Contains(Modes, o.Mode) {
		wrong = append(wrong, fmt.Errorf("mode %q is none of %v", o.Mode, Modes))
	}
	if o.Writers < 0 || o.Readers < 0 {
		wrong = append(wrong, fmt.Errorf("%d writers and %d readers: neither may be negative", o.Writers, o.Readers))
	}
	return errors.Join(wrong...)
}

// Report is the result of a run. Fields of other modes are absent. The programs for other indexes on the same corpora
// use the same names in JSON.
type Report struct {
	Index   string `json:"index"`
	Corpus  string `json:"corpus"` // the file's name, without folder and extension
	Mode    Mode   `json:"mode"`
	Writers int    `json:"writers"`
	Readers int    `json:"readers"`

	// of events: first pass; of load: the writer beside the readers
	BlocksPerSec       float64 `json:"blocks_per_s,omitempty"`
	BlocksPerSecSecond float64 `json:"blocks_per_s_second,omitempty"`

	*Latency      `json:",omitempty"` // of one query
	QueriesPerSec float64             `json:"queries_per_s,omitempty"`

	Seconds  float64 `json:"seconds,omitempty"` // of mixed
	Digest   string  `json:"digest,omitempty"`
	Expected string  `json:"expected_digest,omitempty"` // absent if this corpus is not known

	Holdings        int64        `json:"holdings,omitempty"`
	BytesPerHolding float64      `json:"bytes_per_holding,omitempty"` // resident
	Counted         float64      `json:"counted_bytes_per_holding,omitempty"`
	Stats           *radix.Stats `json:"stats,omitempty"`

	Image *Image `json:"image,omitempty"`
}

// Latency is a distribution of times, in microseconds.
type Latency struct {
	N    int     `json:"queries"`
	P50  float64 `json:"p50_us"`
	P99  float64 `json:"p99_us"`
	P999 float64 `json:"p999_us"`
	Max  float64 `json:"max_us"`

	// P999Typical is the p99.9 of the queries, with the median time of every query. The value is zero in mode load,
	// because the index changes.
	P999Typical float64 `json:"p999_typical_us,omitempty"`
}

func latencyOf(d []time.Duration) *Latency {
	slices.Sort(d)
	at := func(q float64) float64 { return float64(d[min(len(d)-1, int(q*float64(len(d))))].Nanoseconds()) / 1e3 }
	return &Latency{N: len(d), P50: at(0.5), P99: at(0.99), P999: at(0.999), Max: at(1)}
}

// Image is the cost of a snapshot in memory.
type Image struct {
	Export          float64 `json:"export_ms"`
	Import          float64 `json:"import_ms"`
	LongestStep     float64 `json:"longest_step_ms"` // of an export in steps of StepBlocks
	StepBlocks      int     `json:"step_blocks"`
	BytesPerHolding float64 `json:"bytes_per_holding"`
	Runs            int     `json:"runs"`
	Same            bool    `json:"same_checksums"`
	ClearP50        float64 `json:"clear_p50_ms"`
	ClearMax        float64 `json:"clear_max_ms"`
}

// RunIndex runs the mode of o and writes the report to w. An unexpected digest is an error after the report.
func RunIndex(ctx context.Context, o Options, w io.Writer) error {
	if err := o.Validate(); err != nil {
		return fmt.Errorf("bench index: %w", err)
	}
	c, err := corpus.Open(o.File)
	if err != nil {
		return fmt.Errorf("bench index: %w", err)
	}
	defer c.Close()
	o.Writers, o.Readers = max(1, o.Writers), max(1, o.Readers)
	name := strings.TrimSuffix(filepath.Base(o.File), filepath.Ext(o.File))
	b := &run{o: o, c: c, ctx: ctx, report: Report{Index: "kvatlas", Corpus: name, Mode: o.Mode, Writers: o.Writers,
		Readers: o.Readers}}
	if err := map[Mode]func() error{Events: b.events, Queries: b.queries, Mixed: b.mixed, Load: b.load,
		Memory: b.memory, Snapshot: b.snapshot}[o.Mode](); err != nil {
		return fmt.Errorf("bench index: %w", err)
	}
	if o.JSON {
		err = json.NewEncoder(w).Encode(b.report)
	} else {
		err = b.report.print(w)
	}
	if err == nil && b.report.Expected != "" && b.report.Digest != b.report.Expected {
		err = fmt.Errorf("bench index: digest %s, expected %s", b.report.Digest, b.report.Expected)
	}
	return err
}

// run is the state of a run.
type run struct {
	o      Options
	c      *corpus.Reader
	ctx    context.Context
	report Report
}

// fleet is the set of indexes with the position of every worker.
type fleet struct {
	window  int // tokens; 0: none
	shards  []*radix.Index
	ids     []radix.RankID // by worker
	workers []map[radix.RankID]uint32
}

func (b *run) fleet() *fleet {
	f := &fleet{window: b.o.Window}
	for range b.o.Writers {
		f.shards = append(f.shards, radix.New(b.o.Index))
		f.workers = append(f.workers, map[radix.RankID]uint32{})
	}
	f.join(int(b.c.Header().Workers))
	return f
}

func (f *fleet) join(workers int) {
	f.ids = f.ids[:0]
	for w := range workers {
		s := w % len(f.shards)
		id := f.shards[s].AddRank(0, benchBlock)
		f.ids = append(f.ids, id)
		f.workers[s][id] = uint32(w)
	}
}

func (f *fleet) leave() {
	for w, id := range f.ids {
		f.shards[w%len(f.shards)].DropRank(id)
		delete(f.workers[w%len(f.shards)], id)
	}
}

// apply applies a store or removal and skips other operations. The caller owns the scratch e.
func (f *fleet) apply(op *corpus.Op, e *[1]events.Event) {
	e[0] = events.Event{Tier: events.Device, Blocks: op.Blocks, Attention: events.AttentionFull}
	switch op.Kind {
	case corpus.Store:
		e[0].Kind, e[0].HasParent, e[0].Parent, e[0].Locals = events.Stored, op.HasParent, op.Parent, op.Locals
	case corpus.Remove:
		e[0].Kind, e[0].Attention = events.Removed, 0
	default:
		return
	}
	x, id := f.shards[int(op.Worker)%len(f.shards)], f.ids[op.Worker]
	x.Apply(id, 0, e[:])
	if f.window > 0 {
		e[0].Group, e[0].Attention, e[0].HasParent, e[0].Parent, e[0].Locals = 1, 0, false, 0, nil
		if e[0].Kind == events.Stored {
			e[0].Attention, e[0].Window = events.AttentionSlidingWindow, uint32(f.window)
			e[0].Blocks = op.Blocks[max(0, len(op.Blocks)-(f.window+benchBlock-1)/benchBlock):]
		}
		x.Apply(id, 0, e[:])
	}
}

// benchBlock is the assumed number of tokens of a block, for windows.
const benchBlock = 16

// applyAll applies the events of the operations from up to to. Every shard has a goroutine.
func (b *run) applyAll(f *fleet, from, to int) {
	done := make(chan struct{})
	for s := range f.shards {
		go func() {
			defer func() { done <- struct{}{} }()
			var e [1]events.Event
			for i := from; i < to && (i%4096 != 0 || b.ctx.Err() == nil); i++ {
				if op := b.c.Op(i); len(f.shards) == 1 || int(op.Worker)%len(f.shards) == s {
					f.apply(&op, &e)
				}
			}
		}()
	}
	for range f.shards {
		<-done
	}
}

// match runs a query on all shards.
func (f *fleet) match(q []events.LocalHash, answers []radix.Answer) {
	for s := range f.shards {
		f.shards[s].Match(0, q, nil, &answers[s])
	}
}

func (b *run) events() error {
	f := b.fleet()
	h := b.c.Header()
	for pass := range 2 {
		if pass > 0 {
			f.leave()
			f.join(int(h.Workers))
		}
		runtime.GC()
		start := time.Now()
		b.applyAll(f, 0, b.c.Len())
		rate := float64(h.Stored+h.Removed) / time.Since(start).Seconds()
		if pass == 0 {
			b.report.BlocksPerSec = rate
		} else {
			b.report.BlocksPerSecSecond = rate
		}
	}
	runtime.KeepAlive(f)
	return b.ctx.Err()
}

// corpusQueries lists the queries of the corpus.
func (b *run) corpusQueries() (qs [][]events.LocalHash) {
	for _, op := range b.c.Ops() {
		if op.Kind == corpus.Query {
			qs = append(qs, op.Locals)
		}
	}
	return qs
}

// reader runs all queries of a corpus in a loop, starting with the query at index first.
type reader struct {
	f       *fleet
	qs      [][]events.LocalHash
	first   int
	answers []radix.Answer
	took    []time.Duration // times of the timed queries
}

func (b *run) newReaders(f *fleet) (readers []*reader) {
	qs := b.corpusQueries()
	for i := range b.o.Readers {
		readers = append(readers, &reader{f: f, qs: qs, first: i * len(qs) / b.o.Readers,
			answers: make([]radix.Answer, len(f.shards))})
	}
	return readers
}

func (r *reader) query(i int) int { return (r.first + i) % len(r.qs) }

// timed runs queries with a clock, for some rounds or until stop is closed.
func (r *reader) timed(ctx context.Context, rounds int, stop <-chan struct{}) {
	room := rounds * len(r.qs)
	if stop != nil {
		room = 1 << 22 // large enough to avoid growth during the measurement
	}
	r.took = make([]time.Duration, 0, room)
	zero := time.Now() // time.Since reads a single clock, time.Now reads two
	for round := 0; ctx.Err() == nil && (stop != nil || round < rounds); round++ {
		for i := range r.qs {
			q := r.qs[r.query(i)]
			start := time.Since(zero)
			r.f.match(q, r.answers)
			r.took = append(r.took, time.Since(zero)-start)
		}
		select {
		case <-stop:
			return
		default:
		}
	}
}

// untimed runs queries without a clock.
func (r *reader) untimed(ctx context.Context, rounds int) {
	for round := 0; ctx.Err() == nil && round < rounds; round++ {
		for i := range r.qs {
			r.f.match(r.qs[r.query(i)], r.answers)
		}
	}
}

// together runs do for every reader on a separate goroutine and returns the total time.
func together(readers []*reader, do func(r *reader)) time.Duration {
	start := time.Now()
	var all sync.WaitGroup
	for _, r := range readers {
		all.Go(func() { do(r) })
	}
	all.Wait()
	return time.Since(start)
}

// typical returns the median time of every query.
func typical(readers []*reader) []time.Duration {
	byQuery := make([][]time.Duration, len(readers[0].qs))
	for _, r := range readers {
		for i, d := range r.took {
			q := r.query(i)
			byQuery[q] = append(byQuery[q], d)
		}
	}
	medians := make([]time.Duration, len(byQuery))
	for q, d := range byQuery {
		slices.Sort(d)
		medians[q] = d[(len(d)-1)/2]
	}
	return medians
}

func allTimes(readers []*reader) (took []time.Duration) {
	for _, r := range readers {
		took = append(took, r.took...)
	}
	return took
}

// rounds returns the number of rounds for a number of queries.
func rounds(queries int) int { return max(9, (20000+queries-1)/queries) }

func (b *run) queries() error {
	f := b.fleet()
	b.applyAll(f, 0, b.c.Len())
	runtime.GC()
	readers := b.newReaders(f)
	if len(readers[0].qs) == 0 {
		return b.ctx.Err()
	}
	n := rounds(len(readers[0].qs))
	together(readers, func(r *reader) { r.untimed(b.ctx, 1) })
	together(readers, func(r *reader) { r.timed(b.ctx, n, nil) })
	took := together(readers, func(r *reader) { r.untimed(b.ctx, n) })
	if err := b.ctx.Err(); err != nil {
		return err
	}
	all := allTimes(readers)
	b.report.QueriesPerSec = float64(len(all)) / took.Seconds()
	b.report.Latency = latencyOf(all)
	b.report.P999Typical = latencyOf(typical(readers)).P999
	return nil
}

func (b *run) mixed() error {
	f := b.fleet()
	var digest corpus.Digest
	answers := make([]radix.Answer, len(f.shards))
	var e [1]events.Event
	query := 0
	runtime.GC()
	start := time.Now()
	for i := range b.c.Len() {
		op := b.c.Op(i)
		if op.Kind != corpus.Query {
			f.apply(&op, &e)
			continue
		}
		f.match(op.Locals, answers)
		for s := range answers {
			for _, o := range answers[s].Ranks {
				digest.Add(query, f.worker(s, o.Rank), int(o.Depth[0]))
			}
		}
		query++
	}
	b.report.Seconds = time.Since(start).Seconds()
	b.report.Digest = digest.String()
	if want, ok := corpus.Expected(b.c.Header()); ok {
		b.report.Expected = want.String()
	}
	return b.ctx.Err()
}

// worker returns the worker of an id. With a single shard, ids are consecutive and need no map.
func (f *fleet) worker(shard int, id radix.RankID) uint32 {
	if len(f.shards) == 1 && f.ids[id.Slot()] == id {
		return uint32(id.Slot())
	}
	return f.workers[shard][id]
}

func (b *run) load() error {
	f := b.fleet()
	half := b.c.Len() / 2
	b.applyAll(f, 0, half)
	runtime.GC()
	stop, done := make(chan struct{}), make(chan time.Duration)
	go func() {
		start := time.Now()
		b.applyAll(f, half, b.c.Len())
		close(stop)
		done <- time.Since(start)
	}()
	if readers := b.newReaders(f); len(readers[0].qs) > 0 {
		took := together(readers, func(r *reader) { r.timed(b.ctx, 0, stop) })
		if all := allTimes(readers); len(all) > 0 {
			b.report.QueriesPerSec = float64(len(all)) / took.Seconds()
			b.report.Latency = latencyOf(all)
		}
	}
	s := (<-done).Seconds()
	blocks := uint64(0)
	for i := half; i < b.c.Len(); i++ {
		if op := b.c.Op(i); op.Kind != corpus.Query {
			blocks += uint64(len(op.Blocks))
		}
	}
	b.report.BlocksPerSec = float64(blocks) / s
	return b.ctx.Err()
}

func (b *run) memory() error {
	debug.FreeOSMemory()
	before, err := resident()
	if err != nil {
		return err
	}
	f := b.fleet()
	b.applyAll(f, 0, b.c.Len())
	debug.FreeOSMemory()
	after, err := resident()
	if err != nil {
		return err
	}
	var bytes int64
	for _, x := range f.shards {
		s := x.Stats()
		for _, n := range s.Holdings {
			b.report.Holdings += n
		}
		bytes += s.Bytes.Total
		b.report.Stats = &s
	}
	if n := b.report.Holdings; n > 0 {
		b.report.BytesPerHolding, b.report.Counted = float64(after-before)/float64(n), float64(bytes)/float64(n)
	}
	return b.ctx.Err()
}

// Package demo demonstrates the product with real parts: simulated engines with real ZeroMQ sockets, a shim for every
// engine, and an indexer in a separate process on a NATS server with file storage. The indexer is killed in the middle.
//
// The demonstration serves a trace of requests. For every request, it queries the indexer for the longest prefix,
// compares the answer with a naive twin, and serves the request on the best worker. The engines report their events to
// the twin. At the end, the index must contain every announced event, and every answer must be equal to the twin's.
package demo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/trace"
)

// Config configures a demonstration. All fields except L3 are required.
type Config struct {
	Requests  []trace.Request
	Engines   int
	BlockSize int    // tokens; divides trace.BlockTokens
	Capacity  int    // blocks of an engine
	Seed      uint64 // of the random routing for comparison
	Program   string // the indexer's executable

	L3 *L3Config // nil: the engines share no store

	Progress func(Progress) // called with the progress; nil disables the call
}

// Progress is how far the demonstration has come.
type Progress struct {
	Stage    string
	Requests int // served
	Of       int
	Blocks   uint64 // announced
	Hits     float64
	Equal    int // answers equal to the twin's
	Checked  int
}

// Result is the result of a demonstration.
type Result struct {
	Requests        int     `json:"requests"`
	BlocksAnnounced uint64  `json:"blocks_announced"` // in stored events, by the engines
	BlocksApplied   uint64  `json:"blocks_applied"`   // in stored events, by the index, each once
	BlocksPerS      float64 `json:"blocks_per_s"`     // applied, over the time in which requests were served
	HitRate         float64 `json:"hit_rate"`         // share of the prompts' blocks that their worker held

	// The same figure for random workers, and for the workers with the least load.
	HitRateRandom    float64 `json:"hit_rate_random"`
	HitRateLeastLoad float64 `json:"hit_rate_least_load"`

	// Imbalance is the number of computed blocks of the busiest worker over the mean.
	Imbalance          float64 `json:"imbalance"`
	ImbalanceRandom    float64 `json:"imbalance_random"`
	ImbalanceLeastLoad float64 `json:"imbalance_least_load"`

	QueryP50        float64 `json:"query_p50_us"` // over NATS, hashes in, answer out
	QueryP99        float64 `json:"query_p99_us"`
	SelectP50       float64 `json:"select_p50_us"` // over NATS, hashes in, a worker out, booked
	SelectP99       float64 `json:"select_p99_us"`
	SnapshotBytes   int64   `json:"snapshot_bytes"` // of all partitions, at the end
	RestoreMS       float64 `json:"restore_ms"`     // from the start of the second process until it was ready
	Restarts        int     `json:"restarts"`
	EventsAnnounced uint64  `json:"events_announced"`
	EventsLost      uint64  `json:"events_lost"` // announced and not in the index
	AnswersChecked  int     `json:"answers_checked"`
	AnswersEqual    int     `json:"answers_equal"`
	Seconds         float64 `json:"seconds"`

	// only with a shared store; the checked answers then include the store
	L3 *L3Result `json:"l3,omitempty"`

	TTFT *TTFT `json:"ttft,omitempty"` // simulated, in ms; absent with a shared store

	FirstDifference string `json:"first_difference,omitempty"` // between an answer and the twin's
}

// Good reports whether nothing was lost and every answer was right.
func (r *Result) Good() bool {
	return r.EventsLost == 0 && r.BlocksApplied == r.BlocksAnnounced && r.AnswersEqual == r.AnswersChecked &&
		r.AnswersChecked == r.Requests
}

const (
	model     = "demo"
	namespace = "default"
	patience  = 4 * time.Minute // longest wait for any step of the demonstration
)

// show is the state of a demonstration.
type show struct {
	cfg     Config
	dir     string
	indexer *indexer
	conn    *jetstream.Conn
	client  *client.Client
	workers []*worker
	l3      *l3 // nil: the engines share no store

	random, leastLoad *shadow

	result   Result
	took     []time.Duration // of the queries
	without  []time.Duration // latencies of the same queries without the shared store
	choosing []time.Duration
	ours     tally
	open     []string // requests under way, oldest first
	asked    int      // blocks
	serving  time.Duration
	tokens   []uint32
	answer   []uint32
	locals   []events.LocalHash
	names    []events.BlockHash
}

// Run runs the demonstration. Result.Good reports success. An error means that the demonstration could not finish.
func Run(ctx context.Context, cfg Config) (*Result, error) {
	begun := time.Now()
	dir, err := os.MkdirTemp("", "kvatlas-demo-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	rng := rand.New(rand.NewPCG(cfg.Seed, 2))
	s := &show{cfg: cfg, dir: dir, ours: newTally(cfg.Engines),
		random:    newShadow(cfg.Engines, cfg.Capacity, func(busy []int) int { return rng.IntN(len(busy)) }),
		leastLoad: newShadow(cfg.Engines, cfg.Capacity, leastBusy),
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := s.raise(ctx); err != nil {
		return nil, err
	}
	defer s.lower()
	for i, r := range cfg.Requests {
		if i == len(cfg.Requests)/2 {
			if err := s.serveThroughCrash(ctx, i, r); err != nil {
				return nil, fmt.Errorf("request %d: %w", i, err)
			}
			continue
		}
		if i == len(cfg.Requests)*2/5 { // the rest up to the kill is replayed from the log
			within, cancel := context.WithTimeout(ctx, patience)
			_, err := s.client.Snapshot(within)
			cancel()
			if err != nil {
				return nil, fmt.Errorf("snapshot: %w", err)
			}
		}
		if err := s.serve(ctx, i, r); err != nil {
			return nil, fmt.Errorf("request %d: %w", i, err)
		}
	}
	if err := s.count(ctx); err != nil {
		return nil, err
	}
	if s.l3 != nil {
		s.result.L3 = &s.l3.result
	} else {
		s.tell("simulating times", len(cfg.Requests))
		if s.result.TTFT, err = simulateTTFT(ctx, cfg); err != nil {
			return nil, err
		}
	}
	s.result.Seconds = time.Since(begun).Seconds()
	return &s.result, ctx.Err()
}

// raise starts the indexer, then the engines and their shims.
func (s *show) raise(ctx context.Context) (err error) {
	s.tell("starting the indexer", 0)
	if s.indexer, err = newIndexer(s.cfg.Program, s.dir); err != nil {
		return err
	}
	if s.cfg.L3 != nil {
		var config string
		if s.l3, config, err = startL3(s.cfg, s.dir); err != nil {
			return err
		}
		// The twin has the current content of the store, so the indexer must not cache answers of the store.
		s.indexer.more = []string{"--l3-config", config, "--l3-timeout", cmp.Or(s.cfg.L3.Timeout, time.Minute).String(),
			"--l3-hit-life", "1ns", "--l3-miss-life", "1ns"}
	}
	if err := s.indexer.start(ctx); err != nil {
		return err
	}
	if s.conn, err = jetstream.Connect(ctx, jetstream.ConnOptions{URLs: []string{s.indexer.url()}, Name: "kvatlas demo",
		Wait: true}); err != nil {
		return err
	}
	if s.client, err = client.NATS(s.conn.NATS(), namespace, client.Options{}); err != nil {
		return err
	}
	if err := s.waitReady(ctx); err != nil {
		return err
	}
	s.tell("starting the engines", 0)
	for i := range s.cfg.Engines {
		w, err := startWorker(ctx, s.conn, s.cfg, i)
		if err != nil {
			return err
		}
		s.workers = append(s.workers, w)
	}
	for _, w := range s.workers {
		if err := w.waitSubscribed(ctx); err != nil {
			return err
		}
		r := &api.WorkerRegistration{Instance: w.key.Instance, Model: model, BlockSize: uint32(s.cfg.BlockSize)}
		r.Events = api.EventsNone // the worker has only the events of its shim, which has no lease here
		if _, err := s.client.RegisterWorker(ctx, r); err != nil {
			return fmt.Errorf("register %s: %w", w.key, err)
		}
	}
	return nil
}

func (s *show) lower() {
	for _, w := range s.workers {
		w.stop()
	}
	if s.conn != nil {
		s.conn.Close()
	}
	s.indexer.stop()
	if s.l3 != nil {
		s.l3.store.stop()
	}
}

// waitReady waits until the indexer has restored and caught up.
func (s *show) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		attempt, cancel := context.WithTimeout(ctx, time.Second)
		_, err := s.client.Workers(attempt)
		cancel()
		if err == nil {
			return nil
		}
		if dead := s.indexer.ended(); dead != nil {
			return dead
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the indexer is not ready: %w", err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// serve sends a query for a request, checks the answer, and serves the request on the best worker.
func (s *show) serve(ctx context.Context, i int, r trace.Request) error {
	begun := time.Now()
	w, err := s.route(ctx, i, r)
	if err == nil {
		err = s.serveBy(w)
	}
	s.serving += time.Since(begun)
	s.result.Requests++
	s.tell("serving", i+1)
	return err
}

// serveBy serves the request on a worker. Evicted blocks go to the shared store.
func (s *show) serveBy(w *worker) error {
	if err := w.serve(s.tokens, s.answer); err != nil || s.l3 == nil {
		return err
	}
	return s.l3.put(w.takeEvicted())
}

// serveThroughCrash kills the indexer with the NATS server between an answer and the following events, and restarts it.
func (s *show) serveThroughCrash(ctx context.Context, i int, r trace.Request) error {
	w, err := s.route(ctx, i, r)
	if err != nil {
		return err
	}
	s.tell("killing the indexer", i)
	if err := s.indexer.kill(); err != nil {
		return err
	}
	if err := s.serveBy(w); err != nil { // only the shim gets the events
		return err
	}
	s.result.Requests++
	s.tell("restarting the indexer", i+1)
	begun := time.Now()
	if err := s.indexer.start(ctx); err != nil {
		return err
	}
	if err := s.waitReady(ctx); err != nil {
		return err
	}
	s.result.RestoreMS = float64(time.Since(begun).Microseconds()) / 1000
	s.result.Restarts++
	return nil
}

// route queries the indexer, checks the answer, and books the request on the selected worker.
func (s *show) route(ctx context.Context, i int, r trace.Request) (*worker, error) {
	s.tokens = r.PromptTokens(s.tokens[:0], s.cfg.BlockSize)
	s.answer = r.OutputTokens(s.answer[:0], i)
	hasher, err := events.NewHasher(uint32(s.cfg.BlockSize), events.Space{})
	if err != nil {
		return nil, err
	}
	s.locals = hasher.Hash(s.locals[:0], s.tokens)
	if err := s.settle(ctx); err != nil {
		return nil, err
	}
	q := api.Query{Model: model, Hashes: make(api.Hashes, len(s.locals))}
	for i, l := range s.locals {
		q.Hashes[i] = uint64(l)
	}
	if s.l3 != nil { // the store's names are made from tokens
		q.Hashes, q.Tokens = nil, s.tokens
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ask := func(took *[]time.Duration) (*api.Answer, error) {
		begun := time.Now()
		answer, err := s.client.Find(ctx, &q)
		*took = append(*took, time.Since(begun))
		return answer, err
	}
	if s.l3 != nil {
		q.L3 = api.L3Off
		if _, err := ask(&s.without); err != nil {
			return nil, err
		}
		q.L3 = ""
	}
	answer, err := ask(&s.took)
	if err != nil {
		return nil, err
	}
	s.check(i, answer)
	begun := time.Now()
	choice, err := s.client.Select(ctx, &api.SelectRequest{Query: q, RequestID: fmt.Sprint(i), Book: true})
	s.choosing = append(s.choosing, time.Since(begun))
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(s.workers, func(w *worker) bool { return w.key.Instance == choice.Worker })
	if at < 0 {
		return nil, fmt.Errorf("request %d: the unknown worker %q was chosen", i, choice.Worker)
	}
	best, blocks, output := s.workers[at], len(s.locals), len(s.answer)/s.cfg.BlockSize
	s.asked += blocks
	s.ours.add(at, blocks, best.engine.Hit(s.tokens), output)
	if s.l3 != nil {
		s.l3.count(blocks-int(depthOf(answer, best.key)), l3Of(answer, best.key))
	}
	tokens := append(s.tokens[:len(s.tokens):len(s.tokens)], s.answer...)
	s.names = enginesim.AppendNames(s.names[:0], 0, s.cfg.BlockSize, tokens)
	for _, fleet := range []*shadow{s.random, s.leastLoad} {
		fleet.serve(s.names, blocks)
	}
	return best, s.end(ctx, fmt.Sprint(i))
}

// end reports the end of a request's prefill, and the end of an earlier request. A killed indexer process loses its
// bookings.
func (s *show) end(ctx context.Context, id string) error {
	if err := s.client.PrefillComplete(ctx, model, id); err != nil {
		return err
	}
	if s.open = append(s.open, id); len(s.open) <= underWay*len(s.workers) {
		return nil
	}
	err := s.client.Free(ctx, model, s.open[0])
	s.open = s.open[1:]
	if s.result.Restarts > 0 && client.CodeOf(err) == api.CodeUnknownRequest {
		return nil
	}
	return err
}

// settle waits until all announced events are applied, so the index and the twin have the same state.
func (s *show) settle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var want []api.PartitionSeq
	for _, w := range s.workers {
		at, err := w.waitPublished(ctx)
		if err != nil {
			return err
		}
		want = append(want, at)
	}
	_, err := s.client.Find(ctx, &api.Query{Model: model, Hashes: api.Hashes{0}, MinSeq: want})
	return err
}

// check compares an answer with the twins.
func (s *show) check(i int, answer *api.Answer) {
	s.result.AnswersChecked++
	differs := func(format string, args ...any) {
		if s.result.FirstDifference == "" {
			s.result.FirstDifference = fmt.Sprintf("request %d: ", i) + fmt.Sprintf(format, args...)
		}
	}
	var there []bool
	if s.l3 != nil {
		there = s.l3.truth(s.tokens)
		if what := s.l3.check(there, answer); what != "" {
			differs("%s", what)
			return
		}
	}
	for _, w := range s.workers {
		want := w.truth(s.locals)
		got := api.Overlap{}
		for _, o := range answer.Workers {
			if o.Instance == w.key.Instance {
				got = o
			}
		}
		if (want != [events.NumTiers]uint32{got.Device, got.Host, got.Disk, got.External}) || !answer.Complete {
			differs("worker %s: the index has %+v (complete: %v), the twin has %v", w.key, got, answer.Complete, want)
			return
		}
		if s.l3 != nil {
			// a late answer of the store may be smaller
			if load := s.l3.load(there, got.Total()); load != got.L3 && (answer.L3.Status == api.L3OK || load < got.L3) {
				differs("worker %s: the worker would load %d blocks, the index has %d (%s)", w.key, load, got.L3, got.L3Stop)
				return
			}
		}
	}
	s.result.AnswersEqual++
}

func depthOf(answer *api.Answer, key events.RankKey) uint32 {
	for _, o := range answer.Workers {
		if o.Instance == key.Instance && o.Rank == key.Rank {
			return o.Total()
		}
	}
	return 0
}

// l3Of returns the number of blocks that a rank would load from the shared store.
func l3Of(answer *api.Answer, key events.RankKey) int {
	for _, o := range answer.Workers {
		if o.Instance == key.Instance && o.Rank == key.Rank {
			return int(o.L3)
		}
	}
	return 0
}

// count compares the index with the announced events.
func (s *show) count(ctx context.Context) error {
	s.tell("counting", len(s.cfg.Requests))
	if err := s.settle(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	saved, err := s.client.Snapshot(ctx)
	if err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	for _, p := range saved.Snapshots {
		s.result.SnapshotBytes += p.Bytes
	}
	known, err := s.client.Workers(ctx)
	if err != nil {
		return err
	}
	r := &s.result
	for _, w := range s.workers {
		announcedEvents, announcedBlocks := w.announced()
		r.EventsAnnounced += announcedEvents
		r.BlocksAnnounced += announcedBlocks
		lost := announcedEvents
		for _, k := range known.Workers {
			if k.Instance == w.key.Instance {
				r.BlocksApplied += k.Stored
				lost -= min(lost, uint64(k.LastEvent)-1) // the first event begins the incarnation
			}
		}
		r.EventsLost += lost
	}
	r.QueryP50, r.QueryP99 = percentiles(s.took)
	if s.l3 != nil {
		s.l3.result.WithoutP50, s.l3.result.WithoutP99 = percentiles(s.without)
		s.l3.result.Longest = float64(slices.Max(s.took).Microseconds())
	}
	r.SelectP50, r.SelectP99 = percentiles(s.choosing)
	r.BlocksPerS = float64(r.BlocksApplied) / s.serving.Seconds()
	if s.asked > 0 {
		r.HitRate = float64(s.ours.hit) / float64(s.asked)
		r.HitRateRandom = float64(s.random.hit) / float64(s.asked)
		r.HitRateLeastLoad = float64(s.leastLoad.hit) / float64(s.asked)
	}
	r.Imbalance, r.ImbalanceRandom = s.ours.imbalance(), s.random.imbalance()
	r.ImbalanceLeastLoad = s.leastLoad.imbalance()
	return nil
}

// percentiles are the 50th and the 99th, in microseconds; 0 of none.
func percentiles(took []time.Duration) (p50, p99 float64) {
	if len(took) == 0 {
		return 0, 0
	}
	slices.Sort(took)
	at := func(share float64) float64 {
		return float64(took[int(share*float64(len(took)-1))].Nanoseconds()) / 1000
	}
	return at(0.5), at(0.99)
}

func (s *show) tell(stage string, served int) {
	if s.cfg.Progress == nil {
		return
	}
	p := Progress{Stage: stage, Requests: served, Of: len(s.cfg.Requests), Equal: s.result.AnswersEqual,
		Checked: s.result.AnswersChecked}
	for _, w := range s.workers {
		_, blocks := w.announced()
		p.Blocks += blocks
	}
	if s.asked > 0 {
		p.Hits = float64(s.ours.hit) / float64(s.asked)
	}
	s.cfg.Progress(p)
}

// errEnded reports an unexpected end of the indexer.
var errEnded = errors.New("the indexer's process has ended")

package funnel

import (
	"cmp"
	"context"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/internal/operate/tenants"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Config configures the bounds and callbacks of a Tracker.
type Config struct {
	Node string

	// Blocks bounds the blocks in the history, of about 120 bytes each. 0 selects [usualBlocks] for the blocks in the
	// index.
	Blocks int

	// Indexed returns the number of different blocks in the index. nil means 0.
	Indexed func() uint64

	// MaxRate bounds the recorded requests per second, measured in blocks of their prompts. A new block costs about a
	// microsecond. Further requests are only counted. The default is 100,000.
	MaxRate int

	// MaxRead bounds the bytes per second of log messages, beyond a burst of 2 MiB. A block costs about half a
	// microsecond, which must not use a core of a node that follows a fast log or reads a long log again. Further
	// messages are only counted. The default is 2 MiB, about 100,000 blocks.
	MaxRead int

	// Peers queries the histories of all other nodes. unheard is the number of nodes without an answer. nil means that
	// no other nodes exist.
	Peers func(ctx context.Context, q *peerapi.BlockHistoryRequest) (answers []*peerapi.BlockHistory, unheard int)

	// Claimed reports whether a worker's events under a model are valid; see [node.Config].Claimed. nil accepts all
	// events.
	Claimed func(instance events.WorkerID, model string) bool

	// BlockSizes returns the block sizes of a model's workers, from this node's view. nil disables other sizes.
	BlockSizes func(model string) []uint32

	// Tenants bounds the tenants with separate sums; 0 disables the sums by tenant. TenantRoots records the first blocks
	// of their prompts, for tenants that share no blocks.
	Tenants     int
	TenantRoots bool

	// Attributed is called with the sums that a request or a report adds to a tenant; nil disables the callback.
	Attributed func(tenant string, use *tenants.Use)

	// Requested is called with each processed request and the names of its blocks, in order. The names are valid during
	// the call. nil disables the callback.
	Requested func(r *Request, names []Name)

	// Counted is called with the tokens of each processed request, and Reused with the tokens of each report. nil
	// disables a callback.
	Counted func(model string, asked, seen uint64, held, selected Tiers, outcome string)
	Reused  func(model string, tokens uint64)
}

const (
	maxBatch    = 64                     // requests in one query to other nodes
	maxQueue    = 1 << 14                // items: requests, and messages of the log
	maxUnread   = 16 << 20               // bytes of memory of the waiting batches
	maxBurst    = 2 << 20                // bytes of messages that are read at any rate
	peerTime    = 500 * time.Millisecond // deadline of other nodes' answers
	maxPending  = 1 << 15                // choices that wait for a report
	maxPendingN = 1 << 21                // blocks of these choices
)

// item is an entry of the queue; exactly one field is set.
type item struct {
	request *Request
	batch   *logged
	report  *reportItem
	done    chan struct{} // closed after all earlier entries are processed
}

// logged is a batch of the log.
type logged struct {
	*events.Batch
	key events.RankKey
	at  int64 // microseconds since 1970: the time of the application, or of the publication of an old batch
}

type reportItem struct {
	api.Report
	alone bool // the chosen prefill worker did not compute the prompt
	known chan bool
}

// pending is a choice without a report.
type pending struct {
	model, tenant    string
	at               time.Time
	size, isl        uint64
	selected, device uint64 // tokens
	worker           events.WorkerID
	names            []Name // names of selected blocks
	whole            bool   // names contains all blocks of the prompt
}

// Tracker is the funnel of one node. It is safe for concurrent use.
type Tracker struct {
	cfg   Config
	queue chan item

	unread              atomic.Int64 // bytes
	recorded            atomic.Int64 // Unix nanoseconds: end of the time that recorded requests use up (GCRA)
	dropped, eventsLost atomic.Uint64
	forgotten, unheard  atomic.Uint64
	reading             budget

	mu      sync.Mutex // guards the following fields
	history *History
	sums    Buckets
	began   time.Time
	recent  map[string]*recent // by model
	lastID  int64
	tenants *attribution // nil: no sums by tenant

	prompts [maxBatch]prompt // used only by Run, as are the following fields
	pending map[string]*pending
	order   []string
	names   int
	sizes   map[string]*blockSizes // by model
}

// blockSizes caches the block sizes of a model's workers on all nodes.
type blockSizes struct {
	list []uint32
	at   time.Time
}

// budget is a token bucket of bytes. It is safe for concurrent use.
type budget struct {
	mu   sync.Mutex
	left float64
	at   time.Time
}

// spend reports whether bytes are left, and removes n bytes, which may leave a debt. Each second adds rate bytes, up to
// maxBurst.
func (b *budget) spend(n, rate int, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left = min(maxBurst, b.left+float64(rate)*now.Sub(b.at).Seconds())
	if b.at = now; b.left <= 0 {
		return false
	}
	b.left -= float64(n)
	return true
}

// New returns a Tracker. The queue is processed only by Run.
func New(cfg Config) *Tracker {
	if cfg.Indexed == nil {
		cfg.Indexed = func() uint64 { return 0 }
	}
	if cfg.MaxRate == 0 {
		cfg.MaxRate = 100_000
	}
	if cfg.MaxRead == 0 {
		cfg.MaxRead = 2 << 20
	}
	if cfg.Counted == nil {
		cfg.Counted = func(string, uint64, uint64, Tiers, Tiers, string) {}
	}
	if cfg.Attributed == nil {
		cfg.Attributed = func(string, *tenants.Use) {}
	}
	if cfg.Reused == nil {
		cfg.Reused = func(string, uint64) {}
	}
	now := time.Now()
	history := NewHistory(cmp.Or(cfg.Blocks, usualBlocks(0)), now.UnixMicro())
	history.claimed = cfg.Claimed
	return &Tracker{cfg: cfg, queue: make(chan item, maxQueue), history: history,
		began: now, reading: budget{left: maxBurst, at: now}, pending: map[string]*pending{},
		recent: map[string]*recent{}, tenants: newAttribution(cfg.Tenants, cfg.TenantRoots),
		sizes: map[string]*blockSizes{}}
}

// usualBlocks returns the default bound for the number of blocks in the index: four full caches, from 65,536 (8 MB) to
// 524,288 (60 MB).
func usualBlocks(indexed uint64) int { return int(min(max(4*indexed, 1<<16), 1<<19)) }

// Admit reports whether a request with a prompt of the given blocks is recorded now, and counts it otherwise. Callers
// call Admit before Record, so a skipped request costs nothing. Admit is a token bucket (GCRA) of a second.
func (t *Tracker) Admit(blocks int, now time.Time) bool {
	for {
		was := t.recorded.Load()
		from := max(was, now.Add(-time.Second).UnixNano())
		if from > now.UnixNano() {
			t.dropped.Add(1)
			return false
		}
		cost := int64(1+blocks) * int64(time.Second) / int64(t.cfg.MaxRate)
		if t.recorded.CompareAndSwap(was, from+cost) {
			return true
		}
	}
}

// Record records an answered and admitted request. It does not block.
func (t *Tracker) Record(r *Request) {
	select {
	case t.queue <- item{request: r}:
	default:
		t.dropped.Add(1)
	}
}

// Applying copies the batch of a message of the log that is about to be applied. It does not block.
func (t *Tracker) Applying(m *jetstream.Message, b *events.Batch) {
	now := time.Now()
	if t.unread.Load() > maxUnread || !t.reading.spend(len(m.Data), t.cfg.MaxRead, now) {
		t.eventsLost.Add(1)
		return
	}
	x := &logged{Batch: b.Clone(), key: m.Key, at: now.UnixMicro()}
	if taken := int64(m.Time) * 1000; taken != 0 && x.at-taken > old.Microseconds() {
		x.at = taken
	}
	bytes := int64(x.MemoryBytes())
	t.unread.Add(bytes)
	select {
	case t.queue <- item{batch: x}:
	default:
		t.unread.Add(-bytes)
		t.eventsLost.Add(1)
	}
}

// Report records the tokens that an engine has reused of a prompt. It returns false for an unknown choice.
func (t *Tracker) Report(ctx context.Context, r *api.Report) (known bool, err error) {
	x := &reportItem{Report: *r, known: make(chan bool, 1)}
	select {
	case t.queue <- item{report: x}:
	case <-ctx.Done():
		return false, ctx.Err()
	}
	select {
	case known = <-x.known:
		return known, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

// ReportLater is a Report that does not block. alone means a failure of the chosen prefill worker, and a report of the
// decode worker.
func (t *Tracker) ReportLater(r api.Report, alone bool) {
	select {
	case t.queue <- item{report: &reportItem{Report: r, alone: alone, known: make(chan bool, 1)}}:
	default:
		t.dropped.Add(1)
	}
}

// Funnel returns this node's part, with all earlier records.
func (t *Tracker) Funnel(ctx context.Context, model string, since time.Duration) (*api.Funnel, error) {
	if err := t.Flush(ctx); err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	f := t.sums.funnel(model, t.first(since, now), now)
	h := t.history
	f.Nodes = []api.FunnelNode{{
		Node: t.cfg.Node, From: f.From, HistoryFrom: time.UnixMicro(h.from), HistoryLost: h.blocks.lost,
		Dropped: t.dropped.Load(), EventsUnread: t.eventsLost.Load(), Forgotten: t.forgotten.Load(),
		PeersUnheard: t.unheard.Load(),
	}}
	return f, nil
}

// first returns the first span of a window. t.mu is held.
func (t *Tracker) first(since time.Duration, now time.Time) int64 {
	from := now.Add(-since)
	if from.Before(t.began) {
		from = t.began
	}
	return firstSpan(from, now)
}

// Dropped returns the number of requests without a record because of overload.
func (t *Tracker) Dropped() uint64 { return t.dropped.Load() }

// Flush waits until all earlier entries are processed.
func (t *Tracker) Flush(ctx context.Context) error {
	done := make(chan struct{})
	select {
	case t.queue <- item{done: done}:
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// BlockHistory returns this node's history of blocks.
func (t *Tracker) BlockHistory(q *peerapi.BlockHistoryRequest) *peerapi.BlockHistory {
	out := &peerapi.BlockHistory{Blocks: []peerapi.BlockPast{}}
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, n := range q.Blocks {
		if p, ok := t.history.Block(Name(n)); ok {
			p.At = uint32(i)
			out.Blocks = append(out.Blocks, p)
		}
	}
	if len(q.Models) > 0 && t.cfg.BlockSizes != nil {
		out.BlockSizes = map[string][]uint32{}
		for _, model := range q.Models {
			out.BlockSizes[model] = t.cfg.BlockSizes(model)
		}
	}
	for _, w := range q.Workers {
		out.Roots = t.history.Roots(out.Roots, w)
	}
	return out
}

// Run processes the queue until ctx ends.
func (t *Tracker) Run(ctx context.Context) {
	var batch []*Request
	for {
		var next item
		if len(batch) == 0 {
			select {
			case next = <-t.queue:
			case <-ctx.Done():
				return
			}
		} else {
			select {
			case next = <-t.queue:
			default: // the queue is empty
			}
		}
		if next.request != nil && next.request.rejected {
			t.reject(next.request)
			continue
		}
		if next.request != nil {
			if batch = append(batch, next.request); len(batch) < maxBatch {
				continue
			}
			next = item{}
		}
		t.divide(ctx, batch)
		clear(batch)
		batch = batch[:0]
		switch {
		case next.batch != nil:
			t.unread.Add(-int64(next.batch.MemoryBytes()))
			t.apply(next.batch)
		case next.report != nil:
			next.report.known <- t.reported(ctx, next.report)
		case next.done != nil:
			close(next.done)
		}
	}
}

// old is the age at which a message belongs to a log that is read again.
const old = 5 * time.Second

func (t *Tracker) apply(x *logged) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.cfg.Blocks == 0 {
		t.history.Bound(usualBlocks(t.cfg.Indexed()))
	}
	t.history.Apply(x.key, x.Batch, x.at)
}

// divide processes requests, in order. It queries other nodes once for all requests.
func (t *Tracker) divide(ctx context.Context, batch []*Request) {
	if len(batch) == 0 {
		return
	}
	t.learnSizes(ctx, batch)
	var ask []Name
	for i, r := range batch {
		t.history.adapted = t.history.adapted || r.Space.LoRA != ""
		p := &t.prompts[i]
		p.read(r, t.history.adapted)
		if t.cfg.Peers != nil {
			ask = append(ask, p.names[min(int(r.Held), len(p.names)):]...)
			ask = append(append(ask, p.plain...), p.bare...)
			for _, list := range p.other {
				ask = append(ask, list...)
			}
		}
		runtime.Gosched() // answers have priority
	}
	others := t.queryPeers(ctx, ask, peerapi.BlockHistoryRequest{})
	for i, r := range batch {
		t.record(ctx, r, &t.prompts[i], others)
		runtime.Gosched()
	}
}

// learnSizes sets the block sizes of the requests' models. It queries other nodes every ten seconds.
func (t *Tracker) learnSizes(ctx context.Context, batch []*Request) {
	if t.cfg.BlockSizes == nil {
		return
	}
	var ask []string
	for _, r := range batch {
		of := t.sizes[r.Model]
		if of == nil || r.At.Sub(of.at) > span {
			if len(t.sizes) > maxModels {
				clear(t.sizes)
			}
			t.sizes[r.Model] = &blockSizes{t.cfg.BlockSizes(r.Model), r.At}
			ask = append(ask, r.Model)
		}
	}
	if len(ask) > 0 {
		for model, list := range t.queryPeers(ctx, nil, peerapi.BlockHistoryRequest{Models: ask}).sizes {
			if of := t.sizes[model]; of != nil {
				of.list = append(of.list, list...)
				slices.Sort(of.list)
				of.list = slices.Compact(of.list)
			}
		}
	}
	for _, r := range batch {
		if of := t.sizes[r.Model]; of != nil {
			r.BlockSizes = of.list
		}
	}
}

// elsewhere contains the histories of other nodes.
type elsewhere struct {
	blocks map[Name]peerapi.BlockPast
	roots  []peerapi.StoredRoot
	sizes  map[string][]uint32
}

// queryPeers queries the other nodes' histories of blocks, with the remaining fields of q.
func (t *Tracker) queryPeers(ctx context.Context, ask []Name, q peerapi.BlockHistoryRequest) (e elsewhere) {
	e.blocks, e.sizes = map[Name]peerapi.BlockPast{}, map[string][]uint32{}
	if t.cfg.Peers == nil {
		return e
	}
	for len(ask) > 0 || len(q.Workers) > 0 || len(q.Models) > 0 {
		some := ask[:min(len(ask), peerapi.MaxHistoryBlocks)]
		ask = ask[len(some):]
		q.Blocks = nil
		for _, n := range some {
			q.Blocks = append(q.Blocks, uint64(n))
		}
		asking, cancel := context.WithTimeout(ctx, peerTime)
		answers, unheard := t.cfg.Peers(asking, &q)
		cancel()
		t.unheard.Add(uint64(unheard))
		for _, a := range answers {
			for _, p := range a.Blocks {
				if int(p.At) < len(some) {
					n := some[p.At]
					e.blocks[n] = join(e.blocks[n], p)
				}
			}
			e.roots = append(e.roots, a.Roots...)
			for model, list := range a.BlockSizes {
				e.sizes[model] = append(e.sizes[model], list...)
			}
		}
		q.Workers, q.Models = nil, nil
	}
	return e
}

// record processes one request, and stores it.
func (t *Tracker) record(ctx context.Context, r *Request, p *prompt, others elsewhere) {
	var question events.WorkerID // the worker to check
	var since int64
	t.mu.Lock()
	k := known{t.history, others.blocks}
	part := divide(r, p, k, func(w events.WorkerID, at int64) bool {
		question, since = w, at
		return false
	})
	t.mu.Unlock()
	if question != "" && t.strayed(ctx, question, since) {
		t.mu.Lock()
		part = divide(r, p, k, func(events.WorkerID, int64) bool { return true })
		t.mu.Unlock()
	}
	now := r.At.UnixMicro()
	t.mu.Lock()
	counted := t.sums.add(r, &part)
	if counted && t.tenants != nil {
		t.attribute(r, p, &part)
	}
	t.history.Asked(p.names, int(r.Held), r.Worker, now)
	if r.Space.LoRA != "" {
		t.history.Asked(p.plain, 0, "", now)
	}
	if counted {
		t.keep(r, p, part.asked)
	}
	t.mu.Unlock()
	if !counted {
		t.dropped.Add(1)
		return
	}
	if t.cfg.Requested != nil {
		t.cfg.Requested(r, p.names)
	}
	outcome := ""
	if r.Routed {
		outcome = r.outcome()
	}
	t.cfg.Counted(r.Model, part.asked, part.seen, part.heldIn, part.selectedIn, outcome)
	if r.ID != "" && r.Worker != "" {
		selected := min(int(r.Selected), len(p.names))
		t.addPending(r.ID, &pending{model: r.Model, tenant: r.Tenant, at: r.At, size: uint64(r.BlockSize), isl: part.asked,
			selected: part.selected, device: part.selectedIn[events.Device-1], worker: r.Worker,
			names: slices.Clone(p.names[:selected]), whole: selected == len(p.names)})
	}
}

// strayed reports whether a worker has stored prompts since a time, none of which was requested.
func (t *Tracker) strayed(ctx context.Context, w events.WorkerID, since int64) bool {
	t.mu.Lock()
	roots := t.history.Roots(nil, w)
	t.mu.Unlock()
	roots = append(roots, t.queryPeers(ctx, nil, peerapi.BlockHistoryRequest{Workers: []events.WorkerID{w}}).roots...)
	var names []Name
	for _, r := range roots {
		if r.At >= since {
			names = append(names, Name(r.Block))
		}
	}
	if len(names) == 0 {
		return false
	}
	others := t.queryPeers(ctx, names, peerapi.BlockHistoryRequest{})
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, n := range names {
		p, _ := t.history.Block(n)
		if join(p, others.blocks[n]).Asked != 0 {
			return false
		}
	}
	return true
}

// addPending stores a choice until its report arrives.
func (t *Tracker) addPending(id string, p *pending) {
	if was := t.pending[id]; was != nil {
		t.names -= len(was.names)
	} else {
		t.order = append(t.order, id)
	}
	t.pending[id] = p
	t.names += len(p.names)
	for len(t.order) > 0 && (len(t.pending) > maxPending || t.names > maxPendingN || len(t.order) > 2*maxPending) {
		first := t.order[0]
		t.order = t.order[1:]
		if was := t.pending[first]; was != nil {
			t.names -= len(was.names)
			delete(t.pending, first)
			t.forgotten.Add(1)
		}
	}
}

// reported records an engine's reuse for a choice. It returns false for an unknown choice.
func (t *Tracker) reported(ctx context.Context, r *reportItem) bool {
	p := t.pending[r.RequestID]
	if p == nil {
		return false
	}
	delete(t.pending, r.RequestID)
	t.names -= len(p.names)
	t.cfg.Reused(p.model, r.CachedTokens)
	reused := min(p.selected, r.CachedTokens)
	first := min(int((reused+p.size-1)/p.size), len(p.names))
	others := t.queryPeers(ctx, p.names[first:], peerapi.BlockHistoryRequest{})
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.sums.bucketAt(p.model, p.at)
	if b == nil {
		return true
	}
	b.reports++
	b.reported += p.selected
	b.reused += reused
	if t.tenants != nil {
		use := &tenants.Use{Reported: 1, Confirmed: p.selected, Reused: reused}
		t.tenants.add(&t.sums, b, p.tenant, use, time.Now())
		t.cfg.Attributed(p.tenant, use)
	}
	left := p.selected - reused
	lose := func(cause api.FunnelCause, tokens uint64) {
		if tokens = min(tokens, left); tokens > 0 {
			b.lose(&loss{step: api.StepReused, cause: cause, tokens: tokens})
			left -= tokens
		}
	}
	if r.alone {
		lose(api.CausePrefillFailed, left)
	}
	for _, n := range p.names[first:] { // a worker without a block cannot use the blocks behind it
		h, _ := t.history.Block(n)
		if h = join(h, others.blocks[n]); h.Lost >= p.at.UnixMicro() && h.Worker == p.worker {
			lose(api.CauseEvictedLate, left)
			break
		}
	}
	if p.whole && left <= p.size {
		lose(api.CauseLastBlock, left)
	}
	lose(api.CauseLowerTier, p.selected-p.device)
	lose(api.CauseEngine, left)
	return true
}

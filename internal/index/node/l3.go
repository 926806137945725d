package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/sharedstore"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// L3Config configures the stores shared by workers.
type L3Config struct {
	// Models sets, by model, the store of all workers. Models has precedence over registrations.
	Models map[string]hicache.Config

	// Registered returns the store registered by the workers of a model; nil: workers register none. Any goroutine calls
	// Registered, for every query. Dial connects to the masters in registrations, see [sharedstore.MooncakeConfig].
	// Masters in Models may have any address.
	Registered func(model string) *hicache.Sharing
	Dial       func(ctx context.Context, network, address string) (net.Conn, error)

	// Master is the operator's master for stores without a master in registrations. Master may have any address.
	Master hicache.Master

	// Listen, if not nil, calls heard with each message of a Mooncake store's shim, in order, until ctx ends. store is
	// the HTTP address of the store's master.
	Listen func(ctx context.Context, store string, heard func(data []byte))

	// Timeout limits an answer's wait for a store, unless the query sets a limit; default 20 ms.
	Timeout time.Duration

	// Check is the interval of the health checks of a Mooncake master, and the timeout of a check; default 1 s.
	Check time.Duration

	Cache hicache.CacheConfig
}

// DefaultL3Timeout is the default of L3Config.Timeout.
const DefaultL3Timeout = 20 * time.Millisecond

const maxStores = 64

// l3 queries the shared stores. l3 is safe for concurrent use. The node that received the client's query sends a single
// request to the store. For an answer merged from several nodes, the merging node sends the request.
type l3 struct {
	cfg L3Config

	models map[string]*hicache.Sharing // cfg.Models

	mu     sync.Mutex
	stores map[string]*askedStore     // by identity and address
	opened map[namedStore]*askedStore // the same stores, by requested configuration
	asked  uint64                     // counts uses of stores
	ctx    context.Context            // of the goroutines that watch stores; ends with the node
}

// namedStore is a store's configuration with the origin of the configuration.
type namedStore struct {
	config     hicache.Config
	configured bool // by the operator, in Models; otherwise registered by workers
}

type askedStore struct {
	where  string
	cache  *hicache.Cache
	master master              // nil: a folder
	mirror *sharedstore.Mirror // nil: the node does not receive the store's events
	last   uint64              // the value of l3.asked at the last use
	stop   context.CancelFunc

	partial atomic.Uint64 // incomplete answers
}

// master is a Mooncake master, or the leader of several.
type master interface {
	hicache.Store
	Down() string
	Unseen() uint64
	Watch(ctx context.Context)
}

func (l *l3) status() (list []api.StoreStatus) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(l.stores)) {
		list = append(list, l.stores[id].status())
	}
	slices.SortStableFunc(list, func(a, b api.StoreStatus) int { return cmp.Compare(a.Store, b.Store) })
	return list
}

func (s *askedStore) status() api.StoreStatus {
	c := s.cache.Stats()
	out := api.StoreStatus{Store: s.where, Remembered: c.Runs, Questions: c.Questions, Failed: c.Failed, Busy: c.Busy,
		Forgotten: c.Forgotten, Partial: s.partial.Load()}
	if s.master != nil {
		out.Down, out.Strange = s.master.Down(), s.master.Unseen()
		if e, is := s.master.(*elected); is {
			out.Election = e.status()
		}
	}
	if s.mirror != nil {
		m := s.mirror.Stats()
		if m.Lists+m.Gaps+m.Answered > 0 || m.Objects > 0 { // otherwise no shim passes on the store's events
			out.Set = &api.StoreSet{Objects: m.Objects, Whole: m.Whole, Gaps: m.Gaps, Overflows: m.Overflows,
				Lists: m.Lists, Answered: m.Answered, Asked: m.Asked}
		}
	}
	return out
}

func newL3(cfg L3Config) *l3 {
	cfg.Timeout = cmp.Or(max(cfg.Timeout, 0), DefaultL3Timeout)
	if cfg.Registered == nil {
		cfg.Registered = func(string) *hicache.Sharing { return &hicache.Sharing{} }
	}
	l := &l3{cfg: cfg, models: map[string]*hicache.Sharing{}, stores: map[string]*askedStore{},
		opened: map[namedStore]*askedStore{}}
	for model, c := range cfg.Models {
		l.models[model] = hicache.ForAll(c)
	}
	return l
}

// watch allows the watching of stores until ctx ends.
func (l *l3) watch(ctx context.Context) {
	l.mu.Lock()
	l.ctx = ctx
	l.mu.Unlock()
}

// maxOpened limits the number of configurations in l3.opened.
const maxOpened = 1024

// store returns the store of a configuration.
func (l *l3) store(c namedStore) (*askedStore, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.opened[c]
	if s == nil {
		var err error
		if s, err = l.open(c); err != nil {
			return nil, err
		}
		if len(l.opened) >= maxOpened {
			clear(l.opened)
		}
		l.opened[c] = s
	}
	l.asked++
	s.last = l.asked
	return s, nil
}

// open connects to the store of a configuration, or returns an open store. Called with l.mu held.
func (l *l3) open(named namedStore) (*askedStore, error) {
	c := named.config
	where := c.Where()
	if where == "" {
		return nil, errors.New("the workers registered no address of the store: set master_server_address or --l3-master")
	}
	id := c.Identity()
	dial := l.cfg.Dial
	if named.configured { // a configured store may have any address, unlike a registered store
		id, dial = "configured "+id, nil
	}
	if s := l.stores[id]; s != nil {
		return s, nil
	}
	if l.ctx == nil || l.ctx.Err() != nil {
		return nil, errors.New("the node is not running")
	}
	s := &askedStore{where: where, stop: func() {}}
	if c.Folder() != "" {
		s.cache = hicache.NewCache(sharedstore.NewFolder(where), l.cfg.Cache)
	} else {
		cfg := sharedstore.MooncakeConfig{Check: l.cfg.Check, Dial: dial, Changed: func(string) { l.forget(id) }}
		if err := l.openMaster(s, &c, cfg); err != nil {
			return nil, err
		}
	}
	// evict the least recently used store
	if len(l.stores) >= maxStores {
		var oldest string
		for id, s := range l.stores {
			if oldest == "" || s.last < l.stores[oldest].last {
				oldest = id
			}
		}
		l.stores[oldest].stop()
		delete(l.stores, oldest)
		clear(l.opened)
	}
	l.stores[id] = s
	return s, nil
}

// openMaster opens the store of a master and watches it until s.stop is called or the node ends. Called with l.mu held.
func (l *l3) openMaster(s *askedStore, c *hicache.Config, cfg sharedstore.MooncakeConfig) (err error) {
	watching, stop := context.WithCancel(l.ctx)
	s.stop = stop
	if election, elected := c.Election(); elected {
		if s.master, err = newElected(election, cfg); err != nil {
			stop()
			return err
		}
		s.cache = hicache.NewCache(s.master, l.cfg.Cache)
		go s.master.Watch(watching)
		return nil
	}
	cfg.Address = s.where
	master, err := sharedstore.NewMooncake(cfg)
	if err != nil {
		stop()
		return err
	}
	store := hicache.Store(master)
	s.master = master
	if l.cfg.Listen != nil {
		s.mirror = sharedstore.NewMirror(master, sharedstore.MirrorConfig{})
		go l.cfg.Listen(watching, s.where, func(data []byte) { s.mirror.Receive(watching, data) })
		store = s.mirror
	}
	s.cache = hicache.NewCache(store, l.cfg.Cache)
	go master.Watch(watching)
	return nil
}

func (l *l3) forget(id string) {
	l.mu.Lock()
	s := l.stores[id]
	l.mu.Unlock()
	if s != nil {
		s.cache.Forget()
	}
}

// L3Question is a query's request to the shared store. A single goroutine owns the L3Question.
type L3Question struct {
	refused   api.L3 // if no request is possible
	sharing   *hicache.Sharing
	prompt    *hicache.Prompt
	store     *askedStore
	questions []*hicache.Question // one per lane of the prompt; nil: merge sends the request
	timeout   time.Duration
	deadline  time.Time // the time limit of the store's response
	follow    bool      // merge requests the parts that workers would load
	explain   bool
}

// begin starts the request to the store for the query's whole prompt, parallel to the lookup in the index. If the loads
// of workers can be followed from the cached depths, merge sends one request for all workers. With api.L3Beyond, merge
// sends the whole request.
func (l *l3) begin(q *api.Query, blockSize uint32) *L3Question {
	s := &L3Question{timeout: l.cfg.Timeout, explain: q.Explain}
	if q.L3TimeoutMS > 0 {
		s.timeout = time.Duration(q.L3TimeoutMS) * time.Millisecond
	}
	s.deadline = time.Now().Add(s.timeout)
	refuse := func(status api.L3Status, reason string) *L3Question {
		s.refused = api.L3{Status: status, Reason: reason}
		return s
	}
	if q.L3 == api.L3Off {
		return refuse(api.L3NotConfigured, "the query excludes the store")
	}
	s.sharing = l.models[q.Model]
	configured := s.sharing != nil
	if !configured {
		s.sharing = l.cfg.Registered(q.Model)
	}
	config := s.sharing.Config
	switch {
	case s.sharing.Reason != "":
		return refuse(api.L3Mismatch, s.sharing.Reason)
	case config == hicache.Config{}:
		return refuse(api.L3NotConfigured, "no worker of this model has registered a shared store")
	}
	if why := config.Unasked(); why != "" {
		return refuse(api.L3Unavailable, why)
	}
	if why := config.Usable(blockSize); why != "" {
		return refuse(api.L3Mismatch, why)
	}
	if q.Tokens == nil {
		return refuse(api.L3Unavailable, "the query has hashes; the keys of the store need tokens")
	}
	store, err := l.store(namedStore{config, configured || l.cfg.Master.Of(&config)})
	if err == nil {
		s.prompt, err = config.Prompt(q.Plain(), q.LoRA, q.CacheSalt, blockSize)
	}
	if err != nil {
		return refuse(api.L3Unavailable, err.Error())
	}
	s.store = store
	s.follow = s.prompt.Unbroken && q.L3 == "" && !q.Explain
	if !s.follow && q.L3 != api.L3Beyond {
		s.request(0)
	}
	return s
}

// request starts the request for the pages after the first own blocks.
func (s *L3Question) request(own uint32) {
	for _, lane := range s.prompt.Lanes {
		from := 0
		if s.prompt.Continues {
			from = min(int(own), lane.Pages)
		}
		question := s.store.cache.Begin(lane, from)
		question.Ask(0, lane.Pages)
		s.questions = append(s.questions, question)
	}
}

// starts returns the pages at which workers would begin to load: the prompt's first page and the ends of the workers'
// cached prefixes.
func (s *L3Question) starts(answer *api.Answer) []int {
	list := []int{0}
	for i := range answer.Workers {
		if o := &answer.Workers[i]; s.prompt.Continues {
			if _, shares := s.sharing.Rule(events.RankKey{Instance: o.Instance, Rank: o.Rank}); shares {
				list = append(list, int(min(o.Total(), math.MaxInt32)))
			}
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// BeginL3 starts the request for a query's prompt, for a node that answers for the whole cluster. Any goroutine may
// call BeginL3.
func (n *Node) BeginL3(q *api.Query, blockSize uint32) *L3Question { return n.l3.begin(q, blockSize) }

// SharesStore reports whether workers of a model registered a shared store, even an unusable one.
func (n *Node) SharesStore(model string) bool {
	sharing := n.l3.models[model]
	if sharing == nil {
		sharing = n.l3.cfg.Registered(model)
	}
	return sharing.Reason != "" || sharing.Config != hicache.Config{}
}

// Asked reports whether there is a usable store.
func (s *L3Question) Asked() bool { return s.store != nil }

// Merge waits for the store within the time limit and adds the stored blocks to an answer with idle ranks.
func (s *L3Question) Merge(ctx context.Context, answer *api.Answer) { s.merge(ctx, answer, noRanks) }

// merge waits for the store within the time limit and adds the stored blocks to an answer. idle are the ranks without
// blocks of the prompt.
func (s *L3Question) merge(ctx context.Context, answer *api.Answer, idle iter.Seq[*RankOfView]) {
	answer.L3 = s.refused
	if s.store == nil {
		return
	}
	if s.questions == nil { // the request starts now, so the limit excludes the time of the index and of other nodes
		s.deadline = time.Now().Add(s.timeout)
	}
	if s.questions == nil && !s.follow {
		own := uint32(0)
		for i := range answer.Workers {
			own = max(own, answer.Workers[i].Total())
		}
		s.request(own)
	}
	if deadline, has := ctx.Deadline(); has { // leave time to send the answer
		if travel := time.Now().Add(time.Until(deadline) / 2); travel.Before(s.deadline) {
			s.deadline, s.timeout = travel, max(0, s.timeout-s.deadline.Sub(travel))
		}
	}
	ctx, cancel := context.WithDeadline(ctx, s.deadline)
	defer cancel()
	m := s.wait(ctx, answer)
	for i := range answer.Workers {
		s.credit(&answer.Workers[i], m)
	}
	if s.explain {
		s.findBroken(ctx, answer, m)
	}
	if answer.L3.FromStart, _ = m.Load(0, s.sharing.Config.Rule()); answer.L3.Total == 0 {
		return
	}
	for r := range idle {
		o := api.Overlap{Instance: r.Key.Instance, Rank: r.Key.Rank}
		if s.credit(&o, m); o.L3 > 0 {
			answer.Workers = append(answer.Workers, o)
		}
	}
}

// wait requests the parts that workers would load, waits for the store's responses until ctx ends, and returns them.
// The status of the store is set in answer.
func (s *L3Question) wait(ctx context.Context, answer *api.Answer) *hicache.Map {
	if s.follow {
		starts := s.starts(answer)
		for _, lane := range s.prompt.Lanes {
			q := s.store.cache.Begin(lane, 0)
			q.Sound(starts)
			s.questions = append(s.questions, q)
		}
		for _, q := range s.questions {
			q.Follow(ctx, starts)
		}
	}
	result := &answer.L3
	found := make([]hicache.Found, len(s.questions))
	var failed error
	known, age := 0, time.Duration(0)
	for i, q := range s.questions {
		found[i] = q.Wait(ctx)
		known += found[i].Known.Count()
		age = max(age, found[i].Age)
		if failed == nil {
			failed = found[i].Err
		}
	}
	switch {
	case failed == nil:
		result.Status = api.L3OK
	case known > 0:
		result.Status = api.L3Partial
	default:
		result.Status = api.L3Unavailable
	}
	switch {
	case errors.Is(failed, context.DeadlineExceeded):
		result.Reason = fmt.Sprintf("the store did not answer within %v", s.timeout)
	case failed != nil:
		result.Reason = failed.Error()
	}
	m := s.prompt.Map(found)
	result.Total, result.Ranges, result.AgeMS = m.Total(), m.Ranges(), float64(age.Microseconds())/1000
	if failed != nil {
		result.Unknown = m.Unknown()
		s.store.partial.Add(1)
	}
	return m
}

// credit adds to a rank the blocks that the rank would load from the store.
func (s *L3Question) credit(o *api.Overlap, m *hicache.Map) {
	rule, shares := s.sharing.Rule(events.RankKey{Instance: o.Instance, Rank: o.Rank})
	if !shares {
		o.L3Stop = l3NotShared
		return
	}
	load, why := m.Load(o.Total(), rule)
	o.L3, o.L3Stop = load, string(why)
	if o.Bound == "" && s.sharing.Bounded {
		o.Bound = api.BoundStoreObjects
	}
	if o.Path != nil {
		o.Path.L3Behind = m.Behind(min(o.Total()+load, m.Blocks()))
	}
}

// maxLooked limits the blocks that an explanation examines in detail; maxLookedKeys limits the objects of the blocks.
const (
	maxLooked     = 16
	maxLookedKeys = 4096
)

// findBroken counts the existing objects of every block that ended a rank's prefix.
func (s *L3Question) findBroken(ctx context.Context, answer *api.Answer, m *hicache.Map) {
	var blocks []uint32
	for i := range answer.Workers {
		o := &answer.Workers[i]
		end := o.Total() + o.L3
		if o.Path != nil && o.L3Stop == string(hicache.BeyondMissing) && end < m.Blocks() &&
			!slices.Contains(blocks, end) && len(blocks) < maxLooked {
			blocks = append(blocks, end)
		}
	}
	slices.Sort(blocks)
	var keys []string
	of := map[uint32]int{}
	for _, b := range blocks {
		list := s.prompt.Keys(b)
		if len(keys)+len(list) > maxLookedKeys {
			break
		}
		keys, of[b] = append(keys, list...), len(list)
	}
	present, known, _ := s.store.cache.Exists(ctx, keys) // unknown objects are skipped
	at := 0
	for _, b := range blocks {
		there, all := 0, true
		for range of[b] {
			if present.Get(at) {
				there++
			}
			all = all && known.Get(at)
			at++
		}
		if all && there > 0 && there < of[b] {
			answer.L3.Broken = append(answer.L3.Broken, api.BrokenBlock{Block: b, Objects: there, Of: of[b]})
		}
	}
}

// l3NotShared is the L3Stop of a rank without a registered store.
const l3NotShared = "no_store"

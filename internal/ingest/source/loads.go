package source

import (
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Topics of Dynamo's event plane beside the topic of KV-cache events.
const (
	topicLoads    = "kv_metrics"
	topicRequests = "active_sequences_events"
	topicPrefill  = "prefill_events" // of old releases
)

// besideEvents returns the subjects on which Dynamo publishes a topic beside a subject of KV-cache events. The scope of
// the subjects is a namespace, a component or an endpoint, depending on the release (ai-dynamo/dynamo › lib/runtime,
// event plane):
//
//	namespace.NS.component.C.endpoint.E.kv-events   since 1.0
//	namespace.NS.component.C.kv-events              before; kv_events in the oldest releases
//
// A subject without an endpoint covers all endpoints. The result is nil for a subject of another form.
func besideEvents(subject, topic string) []string {
	base, found := strings.CutSuffix(subject, ".kv-events")
	if !found {
		base, found = strings.CutSuffix(subject, ".kv_events")
	}
	base, endpoint, _ := strings.Cut(base, ".endpoint.")
	namespace, _, component := strings.Cut(base, ".component.")
	if !found || !component || !strings.HasPrefix(namespace, "namespace.") {
		return nil
	}
	if endpoint == "" {
		endpoint = "*"
	}
	return []string{namespace + "." + topic, base + "." + topic, base + ".endpoint." + endpoint + "." + topic}
}

const (
	// loadDelay is the time for the collection of loads: a fleet may report with every step.
	loadDelay = 100 * time.Millisecond

	// requestDelay is the time for the collection of changes of requests.
	requestDelay = 5 * time.Millisecond

	// maxRequestChanges and maxRequestBlocks bound a message of changes. maxRequestWaiting bounds the waiting changes.
	maxRequestChanges = 256
	maxRequestBlocks  = 1 << 16
	maxRequestWaiting = 1 << 14
)

// loadRelay relays the loads of a fleet's engines and the requests of its routers: the latest load of each rank, and
// all changes of requests in order.
type loadRelay struct {
	f *Source

	mu       sync.Mutex
	ranks    map[events.RankKey]events.EngineLoad // since the last pass
	requests []api.RouterRequest
	waiting  chan struct{} // of requests
}

// relayLoads relays loads and requests until ctx ends.
func (f *Source) relayLoads(conn *jetstream.Conn) {
	r := &loadRelay{f: f, ranks: map[events.RankKey]events.EngineLoad{}, waiting: make(chan struct{}, 1)}
	var parts sync.WaitGroup
	defer parts.Wait()
	listen := func(topic, lacks string, read func(data []byte) error) {
		for _, subject := range besideEvents(f.Engine, topic) {
			parts.Go(func() {
				err := conn.Listen(f.ctx, subject, func(data []byte) {
					if err := read(data); err != nil {
						f.bad.WarnTo(f.log, "a message without "+topic+" of Dynamo's is skipped", "subject", subject,
							"error", err)
					}
				})
				if f.ctx.Err() == nil {
					f.log.Warn(lacks, "subject", subject, "error", err, "what_to_do",
						"let this user subscribe to the subject; meanwhile the choice of workers ignores the topic")
				}
			})
		}
	}
	listen(topicLoads, "cannot subscribe to the loads of the fleet's engines",
		func(data []byte) error { return events.ReadDynamoLoad(data, r.load) })
	for _, topic := range []string{topicRequests, topicPrefill} {
		listen(topic, "cannot subscribe to the requests of the fleet's routers", func(data []byte) error {
			return events.ReadDynamoRequests(data, f.BlockSize, r.request)
		})
	}
	parts.Go(r.passAll)
	loop.Every(f.ctx, loadDelay, func(time.Time) { r.pass() })
}

// load keeps a load until the next pass.
func (r *loadRelay) load(l events.EngineLoad) {
	if r.f.Worker != "" {
		l.Worker = events.WorkerID(r.f.Worker)
	}
	key := events.RankKey{Instance: l.Worker, Rank: l.Rank}
	r.mu.Lock()
	defer r.mu.Unlock()
	was, waits := r.ranks[key]
	if !waits && len(r.ranks) >= host.MaxRanks {
		return
	}
	for _, field := range []struct{ now, before **uint64 }{{&l.UsedBlocks, &was.UsedBlocks},
		{&l.TotalBlocks, &was.TotalBlocks}, {&l.DecodeBlocks, &was.DecodeBlocks}, {&l.PrefillTokens, &was.PrefillTokens}} {
		if *field.now == nil {
			*field.now = *field.before
		}
	}
	r.ranks[key] = l
}

// request keeps a change of a request until the next pass.
func (r *loadRelay) request(c events.RouterRequest) {
	key := r.f.named(c.Key)
	change := api.RouterRequest{Model: r.f.Model, Worker: key.Instance, Rank: key.Rank, RequestID: c.ID,
		Change: c.Change, PrefillTokens: c.PrefillTokens}
	for _, h := range c.Blocks {
		change.SequenceHashes = append(change.SequenceHashes, uint64(h))
	}
	err := change.Check()
	if err == nil && len(change.SequenceHashes) > maxRequestBlocks {
		err = api.Errorf(api.CodeTooLarge, "a prompt of %d blocks; at most %d", len(change.SequenceHashes),
			maxRequestBlocks)
	}
	if err == nil && !r.keep(change) {
		err = api.Errorf(api.CodeBusy, "%d changes wait for NATS", maxRequestWaiting)
	}
	if err != nil {
		r.f.bad.WarnTo(r.f.log, "a request of a Dynamo router is not counted", "worker", key.Instance, "error", err)
		return
	}
	loop.Wake(r.waiting)
}

// keep adds a change to the waiting changes, unless too many wait.
func (r *loadRelay) keep(change api.RouterRequest) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.requests) >= maxRequestWaiting {
		return false
	}
	r.requests = append(r.requests, change)
	return true
}

// passAll publishes changes after requestDelay, until the source's context ends.
func (r *loadRelay) passAll() {
	for {
		select {
		case <-r.waiting:
			loop.Wait(r.f.ctx, requestDelay)
			r.passRequests()
		case <-r.f.ctx.Done():
			return
		}
	}
}

// passRequests publishes the waiting changes: per worker in order, in messages of bounded size.
func (r *loadRelay) passRequests() {
	r.mu.Lock()
	list := r.requests
	r.requests = nil
	r.mu.Unlock()
	byWorker, blocks := map[events.WorkerID]*api.EngineLoads{}, map[events.WorkerID]int{}
	for _, c := range list {
		m := byWorker[c.Worker]
		full := m != nil && (len(m.Requests) >= maxRequestChanges ||
			blocks[c.Worker]+len(c.SequenceHashes) > maxRequestBlocks)
		if full {
			r.publish(c.Worker, m)
		}
		if m == nil || full {
			m = &api.EngineLoads{}
			byWorker[c.Worker], blocks[c.Worker] = m, 0
		}
		m.Requests = append(m.Requests, c)
		blocks[c.Worker] += len(c.SequenceHashes)
	}
	for worker, m := range byWorker {
		r.publish(worker, m)
	}
}

// pass publishes the waiting loads, in a message per worker.
func (r *loadRelay) pass() {
	r.mu.Lock()
	byWorker := map[events.WorkerID]*api.EngineLoads{}
	for key, l := range r.ranks {
		if byWorker[key.Instance] == nil {
			byWorker[key.Instance] = &api.EngineLoads{}
		}
		byWorker[key.Instance].Loads = append(byWorker[key.Instance].Loads, l)
	}
	clear(r.ranks)
	r.mu.Unlock()
	for worker, loads := range byWorker {
		r.publish(worker, loads)
	}
}

// publish sends a worker's loads or requests to all nodes.
func (r *loadRelay) publish(worker events.WorkerID, loads *api.EngineLoads) {
	subject, err := jetstream.Names(r.f.ns.Name()).Engine(worker)
	var body []byte
	if err == nil {
		body, err = api.Marshal(api.MsgPack, loads)
	}
	if err == nil {
		err = r.f.ns.Conn().Send(subject, api.MsgPack, body)
	}
	if err != nil {
		r.f.bad.WarnTo(r.f.log, "an engine's load could not be passed on", "worker", worker, "error", err,
			"what_to_do", "check NATS, and the right of this user to publish for the worker (indexer auth create)")
	}
}

package main

import (
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Topics of Dynamo's event plane beside that of KV-cache events.
const (
	topicLoads    = "kv_metrics"
	topicRequests = "active_sequences_events"
	topicPrefill  = "prefill_events" // of old releases
)

// besideEvents returns the subjects on which Dynamo publishes a topic beside a subject of KV-cache events. The scope of
// both is a namespace, a component or an endpoint, as the release has it (ai-dynamo/dynamo › lib/runtime, event plane):
//
//	namespace.NS.component.C.endpoint.E.kv-events   since 1.0
//	namespace.NS.component.C.kv-events              before; kv_events in the oldest releases
//
// An endpoint that events does not name is any. It returns nil for a subject of another form.
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
	// loadDelay is how long loads wait for others, so that a fleet that reports with each step is not passed on so.
	loadDelay = 100 * time.Millisecond

	// requestDelay is how long changes of requests wait for others.
	requestDelay = 5 * time.Millisecond

	// maxRequestChanges and maxRequestBlocks bound a message of such changes, and maxRequestWaiting how many wait.
	maxRequestChanges = 256
	maxRequestBlocks  = 1 << 16
	maxRequestWaiting = 1 << 14
)

// loadRelay passes on what a fleet's engines report of themselves, and what its routers sent to them: of loads the last
// of each rank, and of requests every change in order.
type loadRelay struct {
	f *fleet

	mu       sync.Mutex
	ranks    map[events.RankKey]events.EngineLoad // since they were passed on
	requests []api.RouterRequest
	waiting  chan struct{} // of requests
}

// hearLoads passes loads and requests on until ctx ends.
func (f *fleet) hearLoads(conn *jetstream.Conn) {
	r := &loadRelay{f: f, ranks: map[events.RankKey]events.EngineLoad{}, waiting: make(chan struct{}, 1)}
	var parts sync.WaitGroup
	defer parts.Wait()
	hear := func(topic, lacks string, read func(data []byte) error) {
		for _, subject := range besideEvents(f.cfg.engine, topic) {
			parts.Go(func() {
				err := conn.Listen(f.ctx, subject, func(data []byte) {
					if err := read(data); err != nil {
						f.bad.warn(f.log, "a message that is none of Dynamo's "+topic+"; passed over", "subject", subject,
							"error", err)
					}
				})
				if f.ctx.Err() == nil {
					f.log.Warn(lacks, "subject", subject, "error", err, "what_to_do",
						"let this user subscribe to the subject; workers are chosen without it meanwhile")
				}
			})
		}
	}
	hear(topicLoads, "how full the fleet's engines are cannot be heard",
		func(data []byte) error { return events.ReadDynamoLoad(data, r.heard) })
	for _, topic := range []string{topicRequests, topicPrefill} {
		hear(topic, "requests that the fleet's routers send cannot be heard", func(data []byte) error {
			return events.ReadDynamoRequests(data, f.cfg.blockSize, r.heardRequest)
		})
	}
	parts.Go(r.passAll)
	loop.Every(f.ctx, loadDelay, func(time.Time) { r.pass() })
}

// heard keeps a load until the next pass.
func (r *loadRelay) heard(l events.EngineLoad) {
	if r.f.cfg.instance != "" {
		l.Worker = events.WorkerID(r.f.cfg.instance)
	}
	key := events.RankKey{Instance: l.Worker, Rank: l.Rank}
	r.mu.Lock()
	defer r.mu.Unlock()
	was, waits := r.ranks[key]
	if !waits && len(r.ranks) >= maxRanks {
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

// heardRequest keeps a change of a request until the next pass.
func (r *loadRelay) heardRequest(c events.RouterRequest) {
	key := r.f.named(c.Key)
	change := api.RouterRequest{Model: r.f.cfg.model, Worker: key.Instance, Rank: key.Rank, RequestID: c.ID,
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
		r.f.bad.warn(r.f.log, "a request that a Dynamo router sent is not counted", "worker", key.Instance, "error", err)
		return
	}
	loop.Wake(r.waiting)
}

// keep adds a change to those that wait, unless too many do.
func (r *loadRelay) keep(change api.RouterRequest) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.requests) >= maxRequestWaiting {
		return false
	}
	r.requests = append(r.requests, change)
	return true
}

// passAll publishes changes a moment after they come, until the fleet's context ends.
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

// passRequests publishes the changes that wait: per worker in order, in messages of bounded size.
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

// pass publishes the loads that wait, a message for each worker.
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
	subject, err := jetstream.EngineSubject(r.f.ns.Name(), worker)
	var body []byte
	if err == nil {
		body, err = api.Marshal(api.MsgPack, loads)
	}
	if err == nil {
		err = r.f.ns.Conn().Send(subject, api.MsgPack, body)
	}
	if err != nil {
		r.f.bad.warn(r.f.log, "an engine's load could not be passed on", "worker", worker, "error", err,
			"what_to_do", "see that NATS answers, and that this user may publish for the worker (indexer auth example)")
	}
}

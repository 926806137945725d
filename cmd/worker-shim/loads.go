package main

import (
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/loop"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// loadSubjects are where Dynamo's workers and routers publish loads beside a subject of events, which is
// namespace.NS.component.C.kv-events (kv_events in older releases): for the namespace, the component, or an endpoint of
// it, as the release has it (ai-dynamo/dynamo › lib/runtime, event plane). None for a subject of another form.
func loadSubjects(events string) []string {
	base, found := strings.CutSuffix(events, ".kv-events")
	if !found {
		base, found = strings.CutSuffix(events, ".kv_events")
	}
	namespace, _, component := strings.Cut(base, ".component.")
	if !found || !component || !strings.HasPrefix(namespace, "namespace.") {
		return nil
	}
	return []string{namespace + ".kv_metrics", base + ".kv_metrics", base + ".endpoint.*.kv_metrics"}
}

// loadDelay is how long loads wait for others, so that a fleet that reports with each step is not passed on so.
const loadDelay = 100 * time.Millisecond

// loadRelay passes on what a fleet's engines report of themselves: of each rank what was said last.
type loadRelay struct {
	f *fleet

	mu    sync.Mutex
	ranks map[events.RankKey]events.EngineLoad // since they were passed on
}

// hearLoads passes loads on until ctx ends.
func (f *fleet) hearLoads(conn *jetstream.Conn) {
	r := &loadRelay{f: f, ranks: map[events.RankKey]events.EngineLoad{}}
	var parts sync.WaitGroup
	defer parts.Wait()
	for _, subject := range loadSubjects(f.cfg.engine) {
		parts.Go(func() {
			err := conn.Listen(f.ctx, subject, func(data []byte) {
				if err := events.ReadDynamoLoad(data, r.heard); err != nil {
					f.bad.warn(f.log, "a message that is none of Dynamo's loads; passed over", "subject", subject, "error", err)
				}
			})
			if f.ctx.Err() == nil {
				f.log.Warn("how full the fleet's engines are cannot be heard", "subject", subject, "error", err, "what_to_do",
					"let this user subscribe to the subject; workers are chosen without it meanwhile")
			}
		})
	}
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

// pass publishes what waits, a message for each worker.
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
		subject, err := jetstream.EngineSubject(r.f.ns.Name(), worker)
		var body []byte
		if err == nil {
			body, err = api.Marshal(api.MsgPack, loads)
		}
		if err == nil {
			err = r.f.ns.Conn().Send(subject, api.MsgPack, body)
		}
		if err != nil {
			r.f.bad.warn(r.f.log, "how full an engine is could not be passed on", "worker", worker, "error", err,
				"what_to_do", "see that NATS answers, and that this user may publish for the worker (indexer auth example)")
		}
	}
}

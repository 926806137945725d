package source

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/ingest/dynamo"
	"github.com/kvatlas/kvatlas/internal/ingest/etcd"
	"github.com/kvatlas/kvatlas/internal/ingest/kube"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// lookEvery is the time between two looks into the discovery.
const lookEvery = time.Second

// unknownLooks is the number of consecutive looks without the record of a publisher's rank. Then the shim subscribes to
// the publisher without a rank. A worker writes the record a moment before or after the publisher's record, or, before
// 1.6, never.
const unknownLooks = 10

// looks counts, by id, the consecutive looks that have found a publisher without a rank.
type looks map[uint64]int

// count counts a further look.
func (l looks) count(list []dynamo.Publisher) {
	there := map[uint64]bool{}
	for _, p := range list {
		if !p.Known {
			there[p.ID] = true
			l[p.ID]++
		}
	}
	maps.DeleteFunc(l, func(id uint64, _ int) bool { return !there[id] })
}

// ripe reports whether a publisher may be followed: with a rank, or after unknownLooks.
func (l looks) ripe(p dynamo.Publisher) bool { return p.Known || l[p.ID] >= unknownLooks }

// subscription is a connection to a publisher.
type subscription struct {
	dynamo.Publisher
	stop    context.CancelFunc
	stopped bool
	done    chan struct{}
}

// ended reports whether the log contains all received events.
func (h *subscription) ended() bool {
	select {
	case <-h.done:
		return true
	default:
		return false
	}
}

// followDiscovery receives the events of all publishers in Dynamo's discovery.
func (f *Source) followDiscovery() error {
	d, err := f.discover()
	if err != nil {
		return fmt.Errorf("--engine: %w", err)
	}
	subscribed, unknown := map[uint64]*subscription{}, looks{}
	for f.ctx.Err() == nil {
		list, wrong, err := d.publishers()
		for _, err := range wrong {
			f.bad.WarnTo(f.log, "a part of Dynamo's discovery cannot be used", "error", err, "what_to_do",
				"all other parts are used; check that this shim reads the workers' release of Dynamo (docs/engines/dynamo.md)")
		}
		if err != nil && !errors.Is(err, etcd.ErrNotAsked) && !errors.Is(err, kube.ErrNotListed) {
			f.watch.unreached("discovery", err, d.advice)
			f.full.WarnTo(f.log, "Dynamo's discovery cannot be read", "error", err, "what_to_do", d.advice)
		} else if err == nil {
			f.watch.reached("discovery")
			if len(list) == 0 {
				f.full.WarnTo(f.log, "Dynamo's discovery contains no publisher of KV-cache events", "engine", f.Engine,
					"what_to_do", d.empty)
			}
			f.follow(subscribed, unknown, list)
		}
		loop.Wait(f.ctx, lookEvery)
	}
	for _, h := range subscribed {
		<-h.done
	}
	return nil
}

// follow subscribes to new publishers in the list, and ends the subscriptions to missing publishers.
func (f *Source) follow(subscribed map[uint64]*subscription, unknown looks, list []dynamo.Publisher) {
	unknown.count(list)
	there, cards := map[uint64]bool{}, map[uint64]dynamo.Card{}
	for i := range list {
		there[list[i].ID] = strings.HasPrefix(list[i].Scope, f.Topic)
		cards[list[i].ID] = list[i].Card
	}
	for id, h := range subscribed {
		if !there[id] && !h.stopped {
			f.log.Info("a publisher of Dynamo's has gone", "worker", h.Key.Instance, "rank", h.Key.Rank)
			h.stop()
			h.stopped = true
		} else if card := cards[id]; there[id] && !h.stopped && card != h.Card && card != (dynamo.Card{}) {
			f.log.Info("a worker of Dynamo's has a new model card; its shim starts again", "worker", h.Key.Instance, "rank",
				h.Key.Rank, "role", card.Role)
			h.stop()
			h.stopped = true
		}
		if h.stopped && h.ended() {
			delete(subscribed, id)
		}
	}
	ending := map[events.RankKey]bool{} // a new publisher of the rank waits for the end of the earlier
	for _, h := range subscribed {
		ending[h.Key] = ending[h.Key] || h.stopped
	}
	for _, p := range list {
		if subscribed[p.ID] != nil || !there[p.ID] || p.Known && ending[p.Key] || !unknown.ripe(p) {
			continue
		}
		if len(subscribed) >= host.MaxRanks {
			f.full.WarnTo(f.log, "too many workers and ranks for one shim", "at_most", host.MaxRanks, "worker",
				p.Key.Instance, "what_to_do", "run several, each with the --topic of a part of the fleet")
			return
		}
		h := &subscription{Publisher: p, done: make(chan struct{})}
		var ctx context.Context
		ctx, h.stop = context.WithCancel(f.ctx)
		subscribed[p.ID] = h
		f.all.Go(func() error {
			defer close(h.done)
			return host.IgnoreEnd(ctx, f.servePublisher(ctx, p))
		})
	}
}

// servePublisher receives the events of a publisher, and shims its rank, until ctx or the shim ends.
func (f *Source) servePublisher(ctx context.Context, p dynamo.Publisher) (err error) {
	log := f.log.With("worker", p.Key.Instance, "rank", p.Key.Rank)
	if p.Known {
		if bad := checkRank(f.named(p.Key)); bad != nil {
			f.unnamed.WarnTo(log, "a publisher of Dynamo's is passed over", "error", bad, "what_to_do", nameAdvice)
			return nil
		}
	}
	err = zmtp.CheckRemote(p.Endpoint, f.Rule)
	var sub *zmtp.Sub
	if err == nil {
		sub, err = zmtp.DialSub(ctx, p.Endpoint, []string{p.Topic}, zmtp.Config{Rule: f.Rule})
	}
	if err != nil {
		f.bad.WarnTo(log, "cannot connect to a publisher of Dynamo's", "endpoint", p.Endpoint, "error", err, "what_to_do",
			"see the event plane in the worker's log; --dial-allow permits addresses")
		return nil
	}
	defer sub.Stop()
	log.Info("connects to a publisher of Dynamo's", "endpoint", p.Endpoint, "scope", p.Scope, "indexer", p.Indexer)
	deliver := func(e events.RouterEvent) { f.deliver(e, events.PayloadDigest(f.eventLine(&e))) }
	opened := func() {}
	if p.Known {
		feed, served := make(chan shim.Frame, 64), make(chan error, 1)
		receiving, stop := context.WithCancel(ctx)
		ctx = receiving
		go func() {
			served <- f.serve(f.named(p.Key), p.Card, feed, newSetDecoder(), f.source(&p, log))
			stop()
		}()
		give := func(frame shim.Frame) { shim.Give(receiving, feed, frame) }
		opened = func() { give(shim.Frame{Opened: true}) }
		deliver = func(e events.RouterEvent) {
			if e.Key == p.Key {
				give(shim.Frame{Seq: events.EngineSeq(e.ID), Payload: f.eventLine(&e)})
			} else {
				f.passed.WarnTo(log, "router events of another rank than their publisher's are passed over", "of", e.Key)
			}
		}
		defer func() {
			close(feed)
			err = <-served
		}()
	}
	for {
		m, ended := sub.Recv(ctx)
		switch {
		case ended != nil:
			return nil
		case m.Kind == zmtp.Opened:
			opened()
		case m.Kind == zmtp.Closed:
			log.Info("the connection to a publisher of Dynamo's has ended", "endpoint", p.Endpoint, "error", m.Err)
		default:
			data, unread := dynamo.Envelope(m.Frames)
			if unread == nil {
				unread = events.ReadRouterEnvelope(data, deliver)
			}
			if unread != nil {
				f.bad.WarnTo(log, "a message without router events of Dynamo's is skipped", "endpoint", p.Endpoint,
					"error", unread)
			}
		}
	}
}

// indexer requests earlier events from the local indexer of a worker.
type indexer struct {
	f      *Source
	of     events.RankKey
	url    string
	listed bool // the indexer has listed all blocks of the rank since the start of this shim
}

// source returns the source of a publisher's earlier events; nil if the publisher has none.
func (f *Source) source(p *dynamo.Publisher, log *slog.Logger) shim.Source {
	if p.Indexer == "" {
		log.Warn("the worker has no local indexer; missed events clear the rank", "what_to_do",
			"check enable_local_indexer of the publisher, over the request plane tcp")
		return nil
	}
	return &indexer{f: f, of: p.Key, url: p.Indexer}
}

// behind is the number of events before the newest event that follow a list of all blocks. A local indexer reports the
// newest event beside the list, but from a slightly different moment.
const behind = 256

// Ask requests the events from a number on. The first request lists all blocks, since the log may lack blocks.
func (x *indexer) Ask(ctx context.Context, from events.EngineSeq) (said shim.Said, err error) {
	if !x.listed {
		from = 0
	}
	a, err := dynamo.Ask(ctx, x.f.Rule, x.url, x.of, uint64(from))
	if err != nil {
		return said, err
	}
	if !a.Whole {
		for i := range a.Events {
			e := &a.Events[i]
			said.Frames = append(said.Frames, shim.Frame{Seq: events.EngineSeq(e.ID), Payload: x.f.eventLine(e)})
		}
		return said, nil
	}
	since := events.RouterAnswer{}
	if a.Last > 0 {
		if since, err = dynamo.Ask(ctx, x.f.Rule, x.url, x.of, max(a.Last, behind)-behind+1); err != nil {
			return said, err
		}
	}
	if since.Whole {
		return said, errors.New("the worker publishes faster than its local indexer answers")
	}
	said.Whole = &shim.Snapshot{Next: events.EngineSeq(since.Last + 1)}
	for _, list := range [][]events.RouterEvent{a.Events, since.Events} {
		for i := range list {
			said.Whole.Payloads = append(said.Whole.Payloads, x.f.eventLine(&list[i]))
		}
	}
	x.listed = true
	return said, nil
}

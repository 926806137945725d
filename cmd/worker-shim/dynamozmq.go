package main

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
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// lookEvery is how often discovery is looked into.
const lookEvery = time.Second

// unknownLooks is how many looks in a row must have found a publisher without a record that says for which rank it
// publishes: a worker writes that record a moment before or after the other, or, before 1.6, never.
const unknownLooks = 10

// looks counts, by id, how many looks in a row have found a publisher whose rank is not known.
type looks map[uint64]int

// count counts one more look.
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

// ripe reports whether a publisher may be heard: its rank is known, or will not be.
func (l looks) ripe(p dynamo.Publisher) bool { return p.Known || l[p.ID] >= unknownLooks }

// hearing is a publisher that is heard.
type hearing struct {
	dynamo.Publisher
	stop    context.CancelFunc
	stopped bool
	done    chan struct{}
}

// ended reports whether all that it said is in the log.
func (h *hearing) ended() bool {
	select {
	case <-h.done:
		return true
	default:
		return false
	}
}

// hearPlane hears every publisher that Dynamo's discovery names, for as long as it does.
func (f *fleet) hearPlane() error {
	d, err := f.discover()
	if err != nil {
		return fmt.Errorf("--engine: %w", err)
	}
	heard, unknown := map[uint64]*hearing{}, looks{}
	for f.ctx.Err() == nil {
		list, wrong, err := d.publishers()
		for _, err := range wrong {
			f.bad.warn(f.log, "a record of Dynamo's discovery that is passed over", "error", err)
		}
		if err != nil && !errors.Is(err, etcd.ErrNotAsked) && !errors.Is(err, kube.ErrNotListed) {
			f.watch.unreached("discovery", err, d.advice)
			f.full.warn(f.log, "Dynamo's discovery cannot be read", "error", err, "what_to_do", d.advice)
		} else if err == nil {
			f.watch.reached("discovery")
			if len(list) == 0 {
				f.full.warn(f.log, "Dynamo's discovery names nobody who publishes KV-cache events", "engine", f.cfg.engine,
					"what_to_do", d.nobody)
			}
			f.follow(heard, unknown, list)
		}
		loop.Wait(f.ctx, lookEvery)
	}
	for _, h := range heard {
		<-h.done
	}
	return nil
}

// follow hears who is new in the list, and no longer who is not in it.
func (f *fleet) follow(heard map[uint64]*hearing, unknown looks, list []dynamo.Publisher) {
	unknown.count(list)
	there := map[uint64]bool{}
	for i := range list {
		there[list[i].ID] = strings.HasPrefix(list[i].Scope, f.cfg.topic)
	}
	for id, h := range heard {
		if !there[id] && !h.stopped {
			f.log.Info("a publisher of Dynamo's has gone", "worker", h.Key.Instance, "rank", h.Key.Rank)
			h.stop()
			h.stopped = true
		}
		if h.stopped && h.ended() {
			delete(heard, id)
		}
	}
	ending := map[events.RankKey]bool{} // a new publisher of the rank comes after it
	for _, h := range heard {
		ending[h.Key] = ending[h.Key] || h.stopped
	}
	for _, p := range list {
		if heard[p.ID] != nil || !there[p.ID] || p.Known && ending[p.Key] || !unknown.ripe(p) {
			continue
		}
		if len(heard) >= maxRanks {
			f.full.warn(f.log, "too many workers and ranks for one shim", "at_most", maxRanks, "worker", p.Key.Instance,
				"what_to_do", "run several, each with the --topic of a part of the fleet")
			return
		}
		h := &hearing{Publisher: p, done: make(chan struct{})}
		var ctx context.Context
		ctx, h.stop = context.WithCancel(f.ctx)
		heard[p.ID] = h
		f.all.Go(func() error {
			defer close(h.done)
			return ignoreEnd(ctx, f.hearPublisher(ctx, p))
		})
	}
}

// hearPublisher hears one publisher, and shims its rank, until ctx or the shim ends.
func (f *fleet) hearPublisher(ctx context.Context, p dynamo.Publisher) (err error) {
	log := f.log.With("worker", p.Key.Instance, "rank", p.Key.Rank)
	if p.Known {
		if bad := checkRank(f.named(p.Key)); bad != nil {
			f.unnamed.warn(log, "a publisher of Dynamo's is passed over", "error", bad, "what_to_do", nameAdvice)
			return nil
		}
	}
	err = zmtp.CheckRemote(p.Endpoint, f.cfg.rule)
	var sub *zmtp.Sub
	if err == nil {
		sub, err = zmtp.DialSub(ctx, p.Endpoint, []string{p.Topic}, zmtp.Config{Rule: f.cfg.rule})
	}
	if err != nil {
		f.bad.warn(log, "a publisher of Dynamo's cannot be heard", "endpoint", p.Endpoint, "error", err, "what_to_do",
			"see what the worker says of its event plane; --dial-allow permits addresses")
		return nil
	}
	defer sub.Stop()
	log.Info("hears a publisher of Dynamo's", "endpoint", p.Endpoint, "scope", p.Scope, "indexer", p.Indexer)
	deliver := func(e events.RouterEvent) { f.deliver(e, events.PayloadDigest(f.eventLine(&e))) }
	opened := func() {}
	if p.Known {
		key := f.named(p.Key)
		feed, served := make(chan shim.Frame, 64), make(chan error, 1)
		hearing, stop := context.WithCancel(ctx)
		ctx = hearing
		go func() {
			served <- f.serve(key, feed, &setDecoder{}, f.source(&p, log))
			stop()
		}()
		give := func(frame shim.Frame) { shim.Give(hearing, feed, frame) }
		opened = func() { give(shim.Frame{Opened: true}) }
		deliver = func(e events.RouterEvent) {
			if e.Key == p.Key {
				give(shim.Frame{Seq: events.EngineSeq(e.ID), Payload: f.eventLine(&e)})
			} else {
				f.passed.warn(log, "router events of another rank than their publisher's are passed over", "of", e.Key)
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
				f.bad.warn(log, "a message that is none of Dynamo's router events; passed over", "endpoint", p.Endpoint,
					"error", unread)
			}
		}
	}
}

// named is a rank's key with the name that --worker gives.
func (f *fleet) named(key events.RankKey) events.RankKey {
	if f.cfg.instance != "" {
		key.Instance = events.WorkerID(f.cfg.instance)
	}
	return key
}

// setDecoder reads the lines of router events. Dynamo's are about sets: a block that is stored twice and then removed
// is gone, while the log counts copies. So a block is stored here once, until it is removed.
type setDecoder struct{ held map[heldBlock]struct{} }

type heldBlock struct {
	tier  events.Tier
	group events.GroupIndex
	block events.BlockHash
}

// Reset forgets which blocks are held.
func (d *setDecoder) Reset() { clear(d.held) }

// Cleared forgets which blocks are held.
func (d *setDecoder) Cleared() { clear(d.held) }

// Decode reads a line, which is empty for an event that is passed over.
func (d *setDecoder) Decode(line []byte) (m events.Message, err error) {
	if len(line) == 0 {
		return m, nil
	}
	e, err := events.ReadRouterEvent(line)
	if err != nil {
		return m, err
	}
	if d.held == nil {
		d.held = map[heldBlock]struct{}{}
	}
	for _, e := range e.Events() {
		switch e.Kind {
		case events.Stored:
			m.Events = d.store(m.Events, e)
			continue
		case events.Removed:
			for _, b := range e.Blocks {
				delete(d.held, heldBlock{e.Tier, e.Group, b})
			}
		default:
			d.Reset()
		}
		m.Events = append(m.Events, e)
	}
	return m, nil
}

// store appends what of a stored event is not held yet. One of a KV-cache group has no local hashes, and may have no
// blocks: it says what the group serves.
func (d *setDecoder) store(to []events.Event, e events.Event) []events.Event {
	if len(e.Blocks) == 0 {
		return append(to, e)
	}
	for i := 0; i < len(e.Blocks); {
		from := i
		for ; i < len(e.Blocks); i++ {
			key := heldBlock{e.Tier, e.Group, e.Blocks[i]}
			if _, held := d.held[key]; held {
				break
			}
			d.held[key] = struct{}{}
		}
		if i > from {
			part := e
			part.Blocks = e.Blocks[from:i]
			if len(e.Locals) > 0 {
				part.Locals = e.Locals[from:i]
				if from > 0 {
					part.HasParent, part.Parent = true, e.Blocks[from-1]
				}
			}
			to = append(to, part)
		}
		i++
	}
	return to
}

// indexer asks a worker's local indexer.
type indexer struct {
	f     *fleet
	of    events.RankKey
	url   string
	asked bool // it has said all that the rank holds since this shim began
}

// source returns the source of a publisher's earlier events, or nil if the publisher names none.
func (f *fleet) source(p *dynamo.Publisher, log *slog.Logger) shim.Source {
	if p.Indexer == "" {
		log.Warn("the worker has no local indexer that can be asked; what is missed clears the rank", "what_to_do",
			"see that its publisher has enable_local_indexer, over the request plane tcp")
		return nil
	}
	return &indexer{f: f, of: p.Key, url: p.Indexer}
}

// behind is how many events before the newest are applied once more to all that a rank holds. A local indexer says the
// newest beside what it holds, but not at the same moment.
const behind = 256

// Ask asks for the events from one on, and at first for all that is held: what is held now is not known from the log.
func (x *indexer) Ask(ctx context.Context, from events.EngineSeq) (said shim.Said, err error) {
	if !x.asked {
		from = 0
	}
	a, err := dynamo.Ask(ctx, x.f.cfg.rule, x.url, x.of, uint64(from))
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
		if since, err = dynamo.Ask(ctx, x.f.cfg.rule, x.url, x.of, max(a.Last, behind)-behind+1); err != nil {
			return said, err
		}
	}
	if since.Whole {
		return said, errors.New("the worker publishes faster than it can be asked")
	}
	said.Whole = &shim.Snapshot{Next: events.EngineSeq(since.Last + 1)}
	for _, list := range [][]events.RouterEvent{a.Events, since.Events} {
		for i := range list {
			said.Whole.Payloads = append(said.Whole.Payloads, x.f.eventLine(&list[i]))
		}
	}
	x.asked = true
	return said, nil
}

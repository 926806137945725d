package host

import (
	"context"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/ingest/enginehttp"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

const (
	// loadSocketEvery is the least interval between two published loads of a rank. An engine may send a load with every
	// step.
	loadSocketEvery = 100 * time.Millisecond

	// loadSocketSilent is the time without a message after which the engine's API is read instead. SGLang repeats an
	// unchanged load every second.
	loadSocketSilent = 5 * time.Second

	// loadSocketCheck is the longest wait for a message, after which the node's need is checked again.
	loadSocketCheck = time.Second
)

// runLoadSocket reads the load socket of a rank while a node needs the load, and publishes the loads, until ctx ends.
func (p *enginePoll) runLoadSocket(ctx context.Context, ns *jetstream.Namespace, rank enginehttp.Rank) {
	failed := Limiter{Every: p.cfg.LogRepeat}
	for loop.Wait(ctx, p.cfg.EngineLoad) {
		if _, wanted := p.wantedRank(rank.Rank); !wanted {
			continue
		}
		if err := p.readLoadSocket(ctx, ns, rank); err != nil && ctx.Err() == nil {
			failed.WarnTo(p.log, "the engine's load socket cannot be read; the load is read over HTTP instead", "endpoint",
				rank.Load, "error", err, "what_to_do", "check --load-publish-endpoint of the engine")
		}
	}
}

// readLoadSocket reads a load socket until no node needs the load, or ctx ends. The error is an unusable address or
// message, or a failure to publish.
func (p *enginePoll) readLoadSocket(ctx context.Context, ns *jetstream.Namespace, rank enginehttp.Rank) error {
	sub, err := zmtp.DialSub(ctx, rank.Load, []string{rank.LoadTopic}, zmtp.Config{})
	if err != nil {
		return err
	}
	defer sub.Stop()
	for {
		receiving, done := context.WithTimeout(ctx, loadSocketCheck)
		m, ended := sub.Recv(receiving)
		for more := ended == nil; more; { // only the latest load counts
			var next zmtp.Message
			if next, more, _ = sub.TryRecv(); more {
				m = next
			}
		}
		done()
		key, wanted := p.wantedRank(rank.Rank)
		switch {
		case !wanted || ctx.Err() != nil:
			return nil
		case ended != nil || m.Kind != zmtp.Data:
			continue
		}
		l, err := enginehttp.LoadStat(m.Frames, p.size)
		if err == nil {
			err = publishLoads(ns, []events.EngineLoad{reportOf(p.kind, key, &l)})
		}
		if err != nil {
			return err
		}
		p.mu.Lock()
		p.received[key] = time.Now()
		p.mu.Unlock()
		loop.Wait(ctx, loadSocketEvery)
	}
}

// wantedRank returns the rank of this process with a number of the engine, and whether a node needs its load. The only
// rank of an engine matches any number.
func (p *enginePoll) wantedRank(number uint32) (key events.RankKey, wanted bool) {
	ranks := p.wantedRanks()
	i := slices.IndexFunc(ranks, func(k events.RankKey) bool { return uint32(k.Rank) == number })
	if i < 0 && len(ranks) == 1 && p.only {
		i = 0
	}
	if i < 0 {
		return key, false
	}
	return ranks[i], true
}

// silent returns the ranks without a recent message of a load socket.
func (p *enginePoll) silent(ranks []events.RankKey) []events.RankKey {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(ranks, func(k events.RankKey) bool {
		at, some := p.received[k]
		return some && time.Since(at) < loadSocketSilent
	})
}

package server

import (
	"context"
	"crypto/rand"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/hot"
	"github.com/kvatlas/kvatlas/internal/choose/selection"
	"github.com/kvatlas/kvatlas/internal/choose/warm"
	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Warm computes a prefix on a worker. Another node does it if it has the tokens of the hash.
func (s *Server) Warm(ctx context.Context, r *api.WarmRequest) (*api.PrefixCopy, error) {
	named := *r
	if err := s.named(&named.Model); err != nil {
		return nil, err
	}
	if err := s.admitChoice(); err != nil {
		return nil, err
	}
	out, err := s.warmOwn(ctx, &named)
	if codeOf(err) != api.CodeUnknownRequest {
		return out, err
	}
	for _, name := range s.otherNodes() {
		other, failed := s.peer(name)
		if failed != nil {
			continue
		}
		if out, failed = other.Warm(ctx, &named); codeOf(failed) != api.CodeUnknownRequest &&
			codeOf(failed) != api.CodeUnavailable {
			return out, failed
		}
	}
	return nil, err
}

// warmOwn computes a prefix whose tokens the request or this node has. The copy continues after the end of ctx, because
// the engine computes the prompt anyway.
func (s *Server) warmOwn(ctx context.Context, r *api.WarmRequest) (*api.PrefixCopy, error) {
	if s.hots == nil {
		return nil, api.Errorf(api.CodeConflict, "this node copies no prefixes; run nodes with --hot-prefixes 1024")
	}
	prompt := warm.Prompt{Tokens: r.Tokens, LoRA: r.LoRA, Salt: r.CacheSalt}
	if r.Hash != "" {
		hash, err := api.ParsePrefixHash(r.Hash)
		if err != nil {
			return nil, err
		}
		var kept bool
		if prompt, kept = s.hots.prompts.Get(warm.Key{Model: r.Model, Hash: hash}); !kept {
			return nil, api.Errorf(api.CodeUnknownRequest, "no node keeps the tokens of prefix %s; give the tokens, or run "+
				"nodes with --warm-up-memory", r.Hash)
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), warm.DefaultTimeout)
	defer cancel()
	note, err := s.copyPrefix(ctx, r, &prompt)
	if err != nil {
		s.hots.failures.Add(1)
		return nil, err
	}
	s.hots.copies.Add(1)
	return note, nil
}

// copyPrefix books a prompt on a rank, and sends it to the engine.
func (s *Server) copyPrefix(ctx context.Context, r *api.WarmRequest, prompt *warm.Prompt) (*api.PrefixCopy, error) {
	at := events.RankKey{Instance: r.Worker, Rank: r.Rank}
	target, size, err := s.warmTarget(r.Model, at)
	if err != nil {
		return nil, err
	}
	blocks := len(prompt.Tokens) / int(size)
	if blocks == 0 {
		return nil, api.Errorf(api.CodeMalformed, "the prompt has %d tokens, less than a block of %d",
			len(prompt.Tokens), size)
	}
	prompt.Tokens = prompt.Tokens[:blocks*int(size)]
	book := &api.BookRequest{RequestID: "warm-" + rand.Text(), Worker: r.Worker, Rank: r.Rank, ExpectedOutputTokens: 1}
	book.Model, book.BlockSize, book.Tokens = r.Model, size, prompt.Tokens
	book.LoRA, book.CacheSalt = prompt.LoRA, prompt.Salt
	note := &peerapi.CopyNote{Model: r.Model, Blocks: uint32(blocks), Worker: r.Worker, Rank: r.Rank,
		Automatic: r.Automatic}
	query := &api.SelectRequest{Query: book.Query()}
	err = s.selection.Prospect(ctx, query, func(of *selection.Prospect) {
		note.Hash = api.PrefixHash(of.Sequence[blocks-1])
		for i := range of.Ranks {
			if c := &of.Ranks[i]; c.Worker.ID == r.Worker && c.Rank == r.Rank {
				note.Before = min(c.Device, uint32(blocks))
			}
		}
	})
	if err != nil {
		return nil, err
	}
	if int(note.Before) == blocks {
		return nil, api.Errorf(api.CodeConflict, "worker %.64q rank %d holds the prefix already", r.Worker, r.Rank)
	}
	book.EffectivePrefillTokens = uint64(blocks-int(note.Before)) * uint64(size)
	if _, err := s.selection.Book(ctx, book); err != nil {
		return nil, err
	}
	ref := &api.RequestRef{Model: r.Model, RequestID: book.RequestID}
	defer func() { _ = s.selection.Free(context.WithoutCancel(ctx), ref) }() // an expired booking has ended already
	begun := time.Now()
	if err := s.hots.engines.Complete(ctx, target, prompt); err != nil {
		return nil, api.Errorf(api.CodeUnavailable, "worker %.64q: %v", r.Worker, err)
	}
	note.AtMS, note.TookMS = uint64(time.Now().UnixMilli()), float64(time.Since(begun))/float64(time.Millisecond)
	_ = s.selection.PrefillComplete(ctx, ref)
	s.hots.computed.Add(book.EffectivePrefillTokens)
	s.tellCopied(ctx, note)
	return &api.PrefixCopy{Hash: note.Hash, Blocks: note.Blocks, Worker: r.Worker, Rank: r.Rank,
		At: time.UnixMilli(int64(note.AtMS)).UTC(), Automatic: r.Automatic, Computed: book.EffectivePrefillTokens,
		TookMS: note.TookMS}, nil
}

// warmTarget returns the engine of a registered rank, and the size of its blocks.
func (s *Server) warmTarget(model string, at events.RankKey) (to warm.Target, size uint32, err error) {
	pool := s.registry.Pool(model)
	r := pool.Rank(at)
	switch {
	case r == nil:
		return to, 0, api.Errorf(api.CodeUnknownWorker, "worker %.64q rank %d is not registered for %q", at.Instance, at.Rank,
			model)
	case r.Record.Endpoint == "":
		return to, 0, api.Errorf(api.CodeConflict, "worker %.64q is registered without a serving address", at.Instance)
	case r.Record.State != api.WorkerSchedulable || routing.Role(r.Record.Role) == routing.Decode:
		return to, 0, api.Errorf(api.CodeConflict, "worker %.64q is %s with the role %s, so it computes no prompts",
			at.Instance, r.Record.State, r.Record.Role)
	}
	to = warm.Target{Endpoint: r.Record.Endpoint, Model: model}
	if slices.ContainsFunc(pool.Ranks, func(o registry.PoolRank) bool {
		return o.Instance == at.Instance && o.Rank != at.Rank
	}) {
		to.Rank = &at.Rank
	}
	return to, r.BlockSize, nil
}

// tellCopied records a copy on all nodes. A node without the note counts no requests for the copy.
func (s *Server) tellCopied(ctx context.Context, note *peerapi.CopyNote) {
	asking, cancel := context.WithTimeout(ctx, statusPatience)
	defer cancel()
	names := s.nodes()
	_, failed := onAll(names, func(name string) (struct{}, error) {
		return onNode(s, name, func(n oneNode) (struct{}, error) { return struct{}{}, n.Copied(asking, note) })
	})
	for i, err := range failed {
		if err != nil {
			s.log.Info("a node does not count the use of a copy", "node", names[i], "prefix", note.Hash, "reason", err)
		}
	}
}

// Copied records a copy on this node.
func (s *Server) Copied(_ context.Context, note *peerapi.CopyNote) error {
	hash, err := api.ParsePrefixHash(note.Hash)
	if err != nil || s.hots == nil {
		return err
	}
	if m := s.hots.model(note.Model); m != nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.tracker.Copied(s.loads.Now(), hot.Copy{Hash: hash, Depth: note.Blocks, Before: note.Before,
			Rank: events.RankKey{Instance: note.Worker, Rank: note.Rank}, AtMS: note.AtMS, TookMS: note.TookMS,
			Automatic: note.Automatic})
	}
	return nil
}

const (
	warmEvery  = 2 * time.Second // between two looks for prefixes to copy
	warmListed = 16              // prefixes in a look
)

// warmUp copies hot prefixes until ctx ends, on the node with the first name.
func (s *Server) warmUp(ctx context.Context) {
	var under sync.WaitGroup
	defer under.Wait()
	ended := make(chan events.SeqHash)
	look := time.NewTicker(warmEvery)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case hash := <-ended:
			s.hots.planner.Done(hash)
		case <-look.C:
			if s.firstNode() {
				s.startCopies(ctx, &under, ended)
			}
		}
	}
}

// startCopies starts the copies that are worth their cost.
func (s *Server) startCopies(ctx context.Context, under *sync.WaitGroup, ended chan<- events.SeqHash) {
	for _, model := range s.loads.Models() {
		list, err := s.HotPrefixes(ctx, &api.HotRequest{Model: model.Name, Limit: warmListed})
		if err != nil {
			continue // without workers, or not ready
		}
		for i := range list.Prefixes {
			p := &list.Prefixes[i]
			hash, err := api.ParsePrefixHash(p.Hash)
			if err != nil || p.Target == "" || !p.TokensKept {
				continue
			}
			c := &hot.Candidate{Hash: hash, Worker: p.Target, CostMS: p.CostMS, Helped: p.HelpedRequests,
				SavesMSPerS: p.SavesMSPerHour / time.Hour.Seconds()}
			if !s.hots.planner.Take(s.loads.Now(), c) {
				continue
			}
			under.Go(func() {
				s.copyHot(ctx, model.Name, p)
				select {
				case ended <- hash:
				case <-ctx.Done():
				}
			})
		}
	}
}

// copyHot makes an automatic copy.
func (s *Server) copyHot(ctx context.Context, model string, p *api.HotPrefix) {
	made, err := s.Warm(ctx, &api.WarmRequest{Model: model, Hash: p.Hash, Worker: p.Target, Rank: p.TargetRank,
		Automatic: true})
	if err != nil {
		s.log.Warn("a hot prefix was not copied", "prefix", p.Hash, "model", model, "worker", p.Target, "reason", err,
			"what_to_do", "check that the worker serves /v1/completions at its address; nodes try another worker meanwhile")
		return
	}
	s.log.Info("a hot prefix was copied", "prefix", p.Hash, "model", model, "worker", p.Target, "tokens", made.Computed,
		"took_ms", made.TookMS)
}

// codeOf returns the code of an error; "" for nil.
func codeOf(err error) api.Code {
	if err == nil {
		return ""
	}
	return api.AsError(err).Code
}

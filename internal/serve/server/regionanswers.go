package server

import (
	"context"
	"fmt"
	"strings"

	"github.com/kvatlas/kvatlas/internal/fleet/regions"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// findRegions is Find with the prefixes of all regions.
func (s *Server) findRegions(ctx context.Context, q *api.Query) (*api.Answer, error) {
	if s.regional == nil {
		return nil, errNoRegion()
	}
	asked := *q
	asked.Regions = false
	a, err := s.Find(ctx, &asked)
	if err != nil {
		return nil, err
	}
	a.Regions, err = s.prefixesOfRegions(q, s.ownPrefix(a), a.BlockSize)
	return a, err
}

func errNoRegion() error {
	return api.Errorf(api.CodeMalformed, "the request has regions, and this node has no region: start indexer serve with "+
		"--region, or omit regions")
}

// choose chooses a worker within the quota of a tenant, and adds the prefixes of all regions if requested.
func (s *Server) choose(ctx context.Context, q *api.SelectRequest) (*api.Selection, error) {
	if !q.Regions {
		return s.chooseInQuota(ctx, q)
	}
	if s.regional == nil {
		return nil, errNoRegion()
	}
	own := api.RegionPrefix{Region: s.regional.Name, Local: true, State: api.RegionUnknown,
		Reason: "the choice needed no lookup"}
	answered := q.Answered
	q.Regions, q.Answered = false, func(a *api.Answer) {
		own = s.ownPrefix(a)
		if answered != nil {
			answered(a)
		}
	}
	out, err := s.chooseInQuota(ctx, q)
	q.Regions, q.Answered = true, answered
	if err != nil {
		return nil, err
	}
	out.Regions, err = s.prefixesOfRegions(&q.Query, own, out.BlockSize)
	return out, err
}

// ownPrefix returns the longest prefix of the answer, which is of this node's region.
func (s *Server) ownPrefix(a *api.Answer) api.RegionPrefix {
	p := api.RegionPrefix{Region: s.regional.Name, Local: true, State: api.RegionComplete}
	lists := [][]api.Overlap{a.Workers}
	for _, list := range a.ByEndpoint {
		lists = append(lists, list)
	}
	for _, list := range lists {
		for i := range list {
			p.Blocks = max(p.Blocks, list[i].Total())
		}
	}
	p.Tokens = uint64(p.Blocks) * uint64(a.BlockSize)
	if !a.Complete {
		p.State, p.Reason = api.RegionPartial, fmt.Sprintf("partitions %v are not available", a.Missing)
	}
	return p
}

// prefixesOfRegions returns the prefixes of the own region and of the others. blockSize is of the given hashes.
func (s *Server) prefixesOfRegions(q *api.Query, own api.RegionPrefix, blockSize uint32) ([]api.RegionPrefix, error) {
	question := &regions.Question{Model: q.Model, BlockSize: q.BlockSize,
		Locals: func(blockSize, lookahead uint32) ([]events.LocalHash, error) {
			return q.Locals(nil, blockSize, lookahead)
		}}
	switch {
	case q.EngineHashes != nil || q.Hashed != nil:
		question.Unknown = "digests have no hashes of engines: send tokens"
	case q.Hashes != nil:
		question.BlockSize = blockSize
		question.Locals = func(uint32, uint32) ([]events.LocalHash, error) { return locals(q.Hashes), nil }
	case q.Tokens == nil:
		question.Unknown = "the request has no tokens"
	}
	others, err := s.regional.view.Load().Prefixes(s.regional.now(), question)
	return append([]api.RegionPrefix{own}, others...), err
}

// unknownRegions marks all prefixes as unknown, for a prompt without tokens.
func unknownRegions(list []api.RegionPrefix) {
	for i := range list {
		p := &list[i]
		*p = api.RegionPrefix{Region: p.Region, Local: p.Local, PriceMS: p.PriceMS, State: api.RegionUnknown,
			Reason: strings.ReplaceAll(string(api.ReasonNoTokens), "_", " ")}
	}
}

package server

import (
	"context"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/text/tokenize"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// newTokenizers returns what makes tokens of texts; nil: nothing is set to do that.
func (s *Server) newTokenizers() *tokenize.Service {
	t := tokenize.New(tokenize.Config{
		Settings:  s.Tokenizers,
		Rule:      s.Screen.Rule,
		Endpoints: func(model string) []string { return servingEndpoints(s.registry.Pool(model)) },
		Aliases:   s.registry.Aliases,
		Observe: func(model, from string, o tokenize.Outcome, took time.Duration) {
			s.queries.Tokenized(model, from, string(o), took)
		},
	})
	if models := s.Tokenizers.Unasked(); len(models) > 0 {
		s.log.Warn("engines get no texts: the file of --tokenizers has a token_file for them and no addresses", "models",
			models, "what_to_do", "list the engines that may get the token in addresses; see docs/text.md")
	}
	if !t.Serves() {
		return nil
	}
	return t
}

// servingEndpoints are where the workers of a pool serve.
func servingEndpoints(pool *registry.Pool) (list []string) {
	var last events.WorkerID
	for i := range pool.Ranks {
		if r := &pool.Ranks[i]; r.Instance != last && r.Record.Endpoint != "" {
			last = r.Instance
			list = append(list, r.Record.Endpoint)
		}
	}
	return list
}

// readText makes tokens of a query's text. Without any, the query is that of a prompt of which nobody holds anything.
// An error says that nothing here makes tokens at all.
func (s *Server) readText(ctx context.Context, q *api.Query) (asked api.Query, out *api.Tokenization, err error) {
	if q.Text.HasTemplate() && !s.RequestTemplates {
		return asked, nil, api.Errorf(api.CodeMalformed, "the query has a chat_template, and this node runs no chat "+
			"templates of requests: leave it out, so that the model's own is used, or start indexer serve with "+
			"--request-templates")
	}
	if s.tokenizers == nil {
		return asked, nil, api.Errorf(api.CodeMalformed, "this node makes no tokens of prompts and messages: "+
			"send tokens, or start indexer serve with --tokenizers")
	}
	asked, out = *q, &api.Tokenization{}
	asked.Text = nil
	begun := time.Now()
	making, span := tracing.Start(ctx, "tokenize")
	tokens, err := s.tokenizers.Tokenize(making, q.Model, q.Text)
	s.queries.Stage("tokenize", time.Since(begun))
	if err != nil {
		span.Fail(string(tokenize.OutcomeOf(err)), true)
	} else if span.On() {
		span.Set(attribute.Int("llm_d.epp.token_producer.token_count", len(tokens.IDs)))
	}
	span.End()
	switch {
	case err != nil && ctx.Err() != nil:
		return asked, nil, ctx.Err()
	case err != nil:
		out.TokenizeError = fmt.Sprintf("%s: %v", tokenize.OutcomeOf(err), err)
		asked.Hashes, asked.LoRA, asked.CacheSalt = api.Hashes{}, "", ""
		return asked, out, nil
	}
	out.Tokenized, out.PromptTokens = true, len(tokens.IDs)
	asked.Tokens, asked.Media = tokens.IDs[:tokens.Known], tokens.Media
	if q.ReturnTokenIDs {
		out.TokenIDs = tokens.IDs
	}
	return asked, out, nil
}

// findText is Find for a query with a text.
func (s *Server) findText(ctx context.Context, q *api.Query) (*api.Answer, error) {
	if err := s.admit(); err != nil {
		return nil, err
	}
	asked, out, err := s.readText(ctx, q)
	if err != nil {
		return nil, err
	}
	a, err := s.Find(ctx, &asked)
	if err != nil {
		return nil, err
	}
	if a.Tokenization = out; !out.Tokenized {
		a.Reason = api.ReasonNoTokens
	}
	return a, nil
}

// newAnnounced returns what compares tokens of texts with those that engines announce.
func (s *Server) newAnnounced() *tokenize.Announced {
	return tokenize.NewAnnounced(tokenize.AnnouncedConfig{
		Find: s.find, Worker: s.worker,
		Observe: func(model string, c tokenize.Check) { s.queries.TextChecked(model, string(c)) },
		Warn:    func(problem string) { s.log.Warn("tokens differ from the engines'", "problem", problem) },
	})
}

// workersBeside is how many ranks are listed at most to find one: those with the same name but for its last byte.
const workersBeside = 256

// worker is what any node knows of a rank; nil: it cannot be had.
func (s *Server) worker(ctx context.Context, rank api.RankPlace) *api.WorkerInfo {
	near := rank.Instance[:max(0, len(rank.Instance)-1)]
	list, err := s.Workers(ctx, api.WorkersRequest{After: &api.RankPlace{Instance: near}, Limit: workersBeside})
	if err != nil {
		return nil
	}
	for i := range list.Workers {
		if w := &list.Workers[i]; w.Place() == rank {
			return w
		}
	}
	return nil
}

// bytesPerToken is what texts have about, for the load of those whose tokens are not known.
const bytesPerToken = 4

// selectText is Select for a request with a text. Its prompt is as long as its text says: an estimate, if there are no
// tokens.
func (s *Server) selectText(ctx context.Context, q *api.SelectRequest) (*api.Selection, error) {
	asked := *q
	query, out, err := s.readText(ctx, &q.Query)
	if err != nil {
		return nil, err
	}
	asked.Query = query
	if asked.ISLTokens = uint64(out.PromptTokens); !out.Tokenized {
		t := q.Text
		asked.ISLTokens = uint64(len(t.Prompt)+len(t.Messages)+len(t.Tools))/bytesPerToken + 1
	}
	selection, err := s.selection.Select(ctx, &asked)
	q.Tokens = asked.Tokens // for what is recorded of it
	if err == nil {
		if selection.Tokenization = out; out.Tokenized {
			s.announced.Begin(&query, q.Text.Messages != nil, selection)
		}
	}
	return selection, err
}

package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/text/fields"
	"github.com/kvatlas/kvatlas/internal/text/tokenize"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// newTokenizers returns the tokenizers of texts, or nil without a configuration.
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
		s.log.Warn("texts are not sent to engines: the file of --tokenizers has a token_file for engines and no addresses", "models",
			models, "what_to_do", "list the permitted engines in addresses; see docs/text.md")
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

// warnOfText logs the first text of a request that this node routes by load because it has no tokenizers.
func (s *Server) warnOfText(model string) {
	s.textWarning.Do(func() {
		s.log.Warn("requests with prompts and chats as text are routed by load: this node has no --tokenizers", "model", model,
			"what_to_do", "start indexer serve with --tokenizers; see docs/text.md")
	})
}

// readText returns a query with tokens in place of its text. Without tokens, the returned query is that of a prompt of
// which no worker holds a block. The error means that this node has no source of tokens.
func (s *Server) readText(ctx context.Context, q *api.Query) (
	asked api.Query, r *fields.Request, out *api.Tokenization, err error,
) {
	if r, err = fields.Expand(q.Text); err != nil {
		return asked, nil, nil, err
	}
	own := q.Text.Request == nil // the text is the query's own, and an error can be corrected there
	asked, out = *q, &api.Tokenization{UnsupportedFields: r.Unsupported}
	asked.Text = nil
	asked.LoRA, asked.CacheSalt = cmp.Or(q.LoRA, r.LoRA), cmp.Or(q.CacheSalt, r.Salt)
	asked.Tenant = cmp.Or(q.Tenant, s.tenants.Of(ctx, asked.CacheSalt, asked.LoRA))
	if asked.Tokens == nil {
		asked.Tokens = r.Tokens
	}
	template := r.Text.HasTemplate() && !s.RequestTemplates
	switch {
	case template && own:
		return asked, r, nil, api.Errorf(api.CodeMalformed, "the query has a chat_template, and this node runs no chat "+
			"templates of requests: leave it out, so that the model's own is used, or start indexer serve with "+
			"--request-templates")
	case s.tokenizers == nil && own:
		return asked, r, nil, api.Errorf(api.CodeMalformed, "this node makes no tokens of prompts and messages: "+
			"send tokens, or start indexer serve with --tokenizers")
	case template:
		out.UnsupportedFields = append(out.UnsupportedFields, "chat_template")
	}
	var tokens tokenize.Tokens
	switch {
	case len(out.UnsupportedFields) > 0:
		err = fmt.Errorf("unsupported_field: the request has %s; the tokens or the tenant may differ",
			strings.Join(out.UnsupportedFields, ", "))
	case asked.Tokens != nil:
		out.Tokenized, out.PromptTokens = true, len(asked.Tokens)
		return asked, r, out, nil
	case !r.Prompted():
		err = errors.New("the request has no prompt that this node can tokenize")
	case s.tokenizers == nil:
		s.warnOfText(q.Model)
		err = errors.New("this node has no --tokenizers")
	default:
		tokens, err = s.tokenize(ctx, q.Model, &r.Text)
		if ctx.Err() != nil {
			return asked, r, nil, ctx.Err()
		}
		if e, is := errors.AsType[*tokenize.Error](err); is && len(e.Fields) > 0 {
			out.UnsupportedFields = e.Fields
		}
	}
	if err != nil {
		out.TokenizeError = err.Error()
		s.queries.Unsupported(string(r.API), out.UnsupportedFields)
		asked.Tokens, asked.Hashes, asked.CacheSalt = nil, api.Hashes{}, ""
		return asked, r, out, nil
	}
	out.Tokenized, out.PromptTokens, out.Took = true, len(tokens.IDs), tokens.Took
	asked.Tokens, asked.Media = tokens.IDs[:tokens.Known], tokens.Media
	if q.Text.ReturnTokenIDs {
		out.TokenIDs = tokens.IDs
	}
	return asked, r, out, nil
}

// tokenize returns the tokens of a text. The error begins with its outcome.
func (s *Server) tokenize(ctx context.Context, model string, t *api.Text) (tokenize.Tokens, error) {
	begun := time.Now()
	making, span := tracing.Start(ctx, "tokenize")
	defer span.End()
	tokens, err := s.tokenizers.Tokenize(making, model, t)
	s.queries.Stage("tokenize", time.Since(begun))
	if err != nil {
		span.Fail(string(tokenize.OutcomeOf(err)), true)
		return tokens, fmt.Errorf("%s: %w", tokenize.OutcomeOf(err), err)
	}
	if span.On() {
		span.Set(attribute.Int("llm_d.epp.token_producer.token_count", len(tokens.IDs)))
	}
	return tokens, nil
}

// findText is Find for a query with a text.
func (s *Server) findText(ctx context.Context, q *api.Query) (*api.Answer, error) {
	if err := s.admit(); err != nil {
		return nil, err
	}
	asked, _, out, err := s.readText(ctx, q)
	if err != nil {
		return nil, err
	}
	if !out.Tokenized {
		asked.LoRA = "" // valid with tokens only
	}
	a, err := s.Find(ctx, &asked)
	if err != nil {
		return nil, err
	}
	if a.Tokenization = out; !out.Tokenized {
		a.Reason = api.ReasonNoTokens
		unknownRegions(a.Regions)
	}
	return a, nil
}

// newAnnounced returns the comparison of texts' tokens with the engines' events.
func (s *Server) newAnnounced() *tokenize.Announced {
	return tokenize.NewAnnounced(tokenize.AnnouncedConfig{
		Find: s.find, Worker: s.worker, Pause: s.pauseOfChecks(),
		Observe: func(model string, c tokenize.Check) { s.queries.TextChecked(model, string(c)) },
		Warn:    func(problem string) { s.log.Warn("tokens differ from the engines'", "problem", problem) },
	})
}

// checkPause is the time between comparisons of a model's tokens if engines receive tokens of other requests.
const checkPause = 30 * time.Second

func (s *Server) pauseOfChecks() time.Duration {
	if s.ForwardTokens {
		return checkPause
	}
	return 0
}

// announces reports whether events of a chosen rank arrive.
func (s *Server) announces(c *api.Selection) bool {
	r := s.registry.Pool(c.Model).Rank(events.RankKey{Instance: c.Worker, Rank: c.Rank})
	return r != nil && r.Record.Events != api.EventsNone
}

// workersBeside is the maximum number of listed ranks in the search of a rank: ranks with the same name except for the
// last byte.
const workersBeside = 256

// worker returns the information of a rank from any node; nil if not available.
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

// selectText is Select for a request with a text. ISLTokens is the length of further prompts of the request. The length
// of a text without tokens is estimated. Its adapter restricts the candidates.
func (s *Server) selectText(ctx context.Context, q *api.SelectRequest) (*api.Selection, error) {
	query, r, out, err := s.readText(ctx, &q.Query)
	if err != nil {
		return nil, err
	}
	asked := *q
	asked.Query = query
	if out.Tokenized {
		asked.ISLTokens += uint64(out.PromptTokens) + s.estimates.Tokens(query.Model, &r.Further)
	} else {
		asked.ISLTokens += max(1, s.estimates.Tokens(query.Model, &r.Length))
	}
	selection, err := s.choose(ctx, &asked)
	made := out.Tokenized && r.Tokens == nil && q.Tokens == nil
	if made && !r.Partial {
		s.estimates.Learn(query.Model, &r.Length, uint64(out.PromptTokens))
	}
	q.Tokens, q.CacheSalt, q.LoRA, q.Tenant = asked.Tokens, asked.CacheSalt, asked.LoRA, asked.Tenant // for the records
	if err == nil {
		if !out.Tokenized {
			unknownRegions(selection.Regions)
		}
		if selection.Tokenization = out; made && s.announces(selection) {
			out.KeepText = s.announced.Begin(&query, r.Text.Messages != nil, selection)
		}
	}
	return selection, err
}

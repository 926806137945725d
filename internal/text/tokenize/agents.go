package tokenize

import (
	"context"
	"regexp"
	"strings"

	"github.com/kvatlas/kvatlas/internal/text/agents"
	"github.com/kvatlas/kvatlas/internal/text/fields"
	"github.com/kvatlas/kvatlas/internal/text/jinja"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// agentAPI reports whether a text is a request of an agents' API, in Text.Request.
func agentAPI(t *api.Text) bool { return fields.API(t.API).Agents() && t.Request != nil }

// converted returns the chat of a request of an agents' API.
func converted(t *api.Text, template *agents.Template) (*api.Text, error) {
	var c *agents.Chat
	var err error
	if fields.API(t.API) == fields.Messages {
		c, err = agents.Messages(t.Request, template)
	} else {
		c, err = agents.Responses(t.Request)
	}
	if err != nil {
		return nil, failed(Refused, "%s: %w; %s", t.API, err, adviceURL)
	}
	c.API = t.API
	if c.SpecialTokens {
		c.Request = api.Value(`{"add_special_tokens":true}`)
	}
	return &c.Text, nil
}

// emptyTools is an empty list of tools, which the APIs of agents accept and the API of chats refuses.
const emptyTools = "[]"

// convertedForServers returns the chat of a request of an agents' API for a server without the API. The properties of
// the server's template are unknown.
func convertedForServers(t *api.Text) (*api.Text, error) {
	c, err := converted(t, nil)
	if err == nil && string(c.Tools) == emptyTools {
		return nil, failed(Refused, "%s: an empty list of tools is not possible in a chat; give the model a render URL of "+
			"vLLM 0.33", t.API)
	}
	return c, err
}

// generation matches a statement of transformers, which vLLM's test of templates does not contain.
var generation = regexp.MustCompile(`\{%[-+]?\s*generation\b`)

// properties returns the properties of the template that conversions of Messages depend on, as vLLM determines them at
// the start of a server. nil means that they are unknown.
func (c *renderer) properties(ctx context.Context) (*agents.Template, error) {
	if known := c.known.Load(); known != nil {
		return known.Template, nil
	}
	p := &knownProperties{}
	if !c.clock || strings.Contains(c.text, "strftime_now is defined") { // vLLM's test has no strftime_now
		p.Template = &agents.Template{DisabledEffort: "none"}
		merge, err := c.refusesSystem(ctx)
		if err != nil {
			return nil, err
		}
		p.MergeSystem = merge
		ignored, err := c.ignoresNone(ctx)
		if err != nil {
			return nil, err
		}
		if ignored {
			p.DisabledEffort = "low"
		}
	}
	c.known.Store(p)
	return p.Template, nil
}

// knownProperties are the result of properties. Template may be nil.
type knownProperties struct{ *agents.Template }

// refusesSystem reports whether the template refuses system messages after the first message. The error is the
// context's.
func (c *renderer) refusesSystem(ctx context.Context) (bool, error) {
	if generation.MatchString(c.text) {
		return true, nil
	}
	var messages []any
	for _, role := range []string{"system", "user", "system", "user"} {
		m := jinja.NewDict()
		m.Set("role", role)
		m.Set("content", "t")
		messages = append(messages, m)
	}
	_, err := c.template.Render(ctx, jinja.Vars{"messages": jinja.List(messages...), "add_generation_prompt": false})
	return err != nil, ctx.Err()
}

// ignoresNone reports whether the template has no text of its own for the reasoning effort none. The error is the
// context's.
func (c *renderer) ignoresNone(ctx context.Context) (bool, error) {
	hi := &api.Text{Messages: api.Value(`[{"role":"user","content":"Hi"}]`)}
	none, err := c.render(ctx, hi, &options{effort: "none"})
	if err != nil {
		return true, ctx.Err()
	}
	for _, effort := range efforts {
		if effort == "none" || effort == "minimal" { // Messages has no minimal effort
			continue
		}
		if text, err := c.render(ctx, hi, &options{effort: effort}); err == nil && text == none {
			return true, nil
		}
	}
	return false, ctx.Err()
}

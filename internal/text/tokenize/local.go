package tokenize

import (
	"context"
	"errors"

	"github.com/kvatlas/kvatlas/internal/text/agents"
	"github.com/kvatlas/kvatlas/internal/text/bpe"
	"github.com/kvatlas/kvatlas/internal/text/jinja"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Local tokenizes prompts by a tokenizer.json, and chats by the template beside the file.
type Local struct {
	bpe   *bpe.Tokenizer
	chat  *renderer  // nil without a template
	parts bpe.Memory // tokens of parts of chats; nil disables caching
}

// NewLocal parses a tokenizer.json. The error names the first unsupported part.
func NewLocal(file []byte) (*Local, error) {
	t, err := bpe.New(file)
	if err != nil {
		return nil, failed(Refused, "%w; give the model a render or tokenize URL", err)
	}
	return &Local{bpe: t}, nil
}

// readTemplate reads the chat template for a tokenizer.json in a folder.
func (l *Local) readTemplate(dir, path string, read func(string) ([]byte, error)) (err error) {
	if l.chat, err = readChat(dir, path, read); err != nil {
		return failed(Refused, "%w; give the model a render or tokenize URL, or accept only prompts with "+
			"chat_template: none", err)
	}
	return nil
}

// Tokenize accepts prompts, and messages and requests of agents' APIs if the model has a template.
func (l *Local) Tokenize(ctx context.Context, t *api.Text) (Tokens, error) {
	if agentAPI(t) {
		var template *agents.Template
		var err error
		if l.chat != nil {
			template, err = l.chat.properties(ctx)
		}
		if err == nil {
			t, err = converted(t, template)
		}
		if err != nil {
			return Tokens{}, err
		}
	}
	o, err := localOptions(t)
	if err != nil {
		return Tokens{}, err
	}
	text, special := t.Prompt, true
	if t.Messages != nil {
		special = false
		if text, err = l.render(ctx, t, &o); err != nil {
			return Tokens{}, err
		}
	}
	if o.special != nil {
		special = *o.special
	}
	if !special {
		return l.encode(ctx, text, func(ctx context.Context, to []uint32, text string) ([]uint32, error) {
			return l.bpe.EncodeText(ctx, to, text, l.parts)
		})
	}
	return l.encode(ctx, text, l.bpe.Encode)
}

func (l *Local) render(ctx context.Context, t *api.Text, o *options) (string, error) {
	c := l.chat
	if c == nil {
		return "", failed(Refused, "the model has no chat template for messages, because the folder of its "+
			"tokenizer.json has no chat template; add chat_template.jinja there, or give the model a render or tokenize URL")
	}
	var err error
	if t.ChatTemplate != "" {
		c, err = c.withTemplate(ctx, t.ChatTemplate)
		switch {
		case err != nil && ctx.Err() != nil:
			return "", ctx.Err()
		case err != nil:
			return "", failed(Refused, "chat_template: %w", err)
		}
	}
	text, err := c.render(ctx, t, o)
	switch {
	case err != nil && ctx.Err() != nil:
		return "", ctx.Err()
	case errors.Is(err, jinja.ErrTooMuch):
		return "", failed(Refused, "%w; %s", err, adviceURL)
	case err != nil:
		return "", failed(Refused, "%w", err)
	case t.ChatTemplate != "" && len(text) > api.MaxBody:
		return "", failed(Refused, "the output of chat_template has %d bytes, more than the %d of a request", len(text),
			api.MaxBody)
	}
	return text, nil
}

func (l *Local) encode(
	ctx context.Context, text string, by func(context.Context, []uint32, string) ([]uint32, error),
) (Tokens, error) {
	ids, err := by(ctx, make(api.Tokens, 0, len(text)/bytesPerToken+8), text)
	switch {
	case err != nil && ctx.Err() != nil:
		return Tokens{}, ctx.Err()
	case err != nil:
		return Tokens{}, failed(Refused, "%w", err)
	case len(ids) > api.MaxTokens:
		return Tokens{}, failed(Refused, "the prompt has %d tokens, more than %d", len(ids), api.MaxTokens)
	}
	return Tokens{IDs: ids, Known: len(ids)}, nil
}

// lasting reports whether the tokens of a text are independent of the time.
func (l *Local) lasting(t *api.Text) bool {
	return t.Messages == nil && !agentAPI(t) || t.ChatTemplate == "" && (l.chat == nil || !l.chat.clock)
}

// bytesPerToken is the approximate size of a token in texts.
const bytesPerToken = 4

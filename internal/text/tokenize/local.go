package tokenize

import (
	"context"
	"errors"

	"github.com/kvatlas/kvatlas/internal/text/bpe"
	"github.com/kvatlas/kvatlas/internal/text/jinja"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Local makes tokens of prompts by a tokenizer.json, and of chats by the template beside it.
type Local struct {
	bpe   *bpe.Tokenizer
	chat  *renderer  // nil: there is no template
	parts bpe.Memory // of chats; nil: none
}

// NewLocal reads a tokenizer.json. The error says what of it is not known here.
func NewLocal(file []byte) (*Local, error) {
	t, err := bpe.New(file)
	if err != nil {
		return nil, failed(Refused, "%w; give the model a render or tokenize URL", err)
	}
	return &Local{bpe: t}, nil
}

// readTemplate reads the chat template of a tokenizer.json that is in a folder.
func (l *Local) readTemplate(dir, path string, read func(string) ([]byte, error)) (err error) {
	if l.chat, err = readChat(dir, path, read); err != nil {
		return failed(Refused, "%w; give the model a render or tokenize URL, or take prompts alone with "+
			"chat_template: none", err)
	}
	return nil
}

// Tokenize takes prompts, and messages if there is a template.
func (l *Local) Tokenize(ctx context.Context, t *api.Text) (Tokens, error) {
	if t.Messages != nil {
		text, err := l.render(ctx, t)
		if err != nil {
			return Tokens{}, err
		}
		return l.encode(ctx, text, func(ctx context.Context, to []uint32, text string) ([]uint32, error) {
			return l.bpe.EncodeText(ctx, to, text, l.parts)
		})
	}
	return l.encode(ctx, t.Prompt, l.bpe.Encode)
}

func (l *Local) render(ctx context.Context, t *api.Text) (string, error) {
	c := l.chat
	if c == nil {
		return "", failed(Refused, "messages need the model's chat template, and there is none beside its "+
			"tokenizer.json; put it there as chat_template.jinja, or give the model a render or tokenize URL")
	}
	var err error
	if t.ChatTemplate != "" {
		c, err = c.with(ctx, t.ChatTemplate)
		switch {
		case err != nil && ctx.Err() != nil:
			return "", ctx.Err()
		case err != nil:
			return "", failed(Refused, "chat_template: %w", err)
		}
	}
	text, err := c.render(ctx, t)
	switch {
	case err != nil && ctx.Err() != nil:
		return "", ctx.Err()
	case errors.Is(err, jinja.ErrTooMuch):
		return "", failed(Refused, "%w; %s", err, adviceURL)
	case err != nil:
		return "", failed(Refused, "%w", err)
	case t.ChatTemplate != "" && len(text) > api.MaxBody:
		return "", failed(Refused, "chat_template makes a text of %d bytes, more than the %d of a request", len(text),
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

// lasting reports whether a text has the same tokens at any time.
func (l *Local) lasting(t *api.Text) bool {
	return t.Messages == nil || t.ChatTemplate == "" && (l.chat == nil || !l.chat.clock)
}

// bytesPerToken is what texts have about.
const bytesPerToken = 4

package tokenize

import (
	"context"

	"github.com/kvatlas/kvatlas/internal/bpe"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Local makes tokens of prompts by a tokenizer.json.
type Local struct{ bpe *bpe.Tokenizer }

// NewLocal reads a tokenizer.json. The error says what of it is not known here.
func NewLocal(file []byte) (*Local, error) {
	t, err := bpe.New(file)
	if err != nil {
		return nil, failed(Refused, "%w; give the model a render or tokenize URL", err)
	}
	return &Local{bpe: t}, nil
}

// Tokenize takes prompts, and refuses messages.
func (l *Local) Tokenize(_ context.Context, t *api.Text) (Tokens, error) {
	if t.Messages != nil {
		return Tokens{}, failed(Refused, "messages need the model's chat template, and its tokenizer.json has none; give "+
			"the model a render or tokenize URL")
	}
	ids, err := l.bpe.Encode(make(api.Tokens, 0, len(t.Prompt)/bytesPerToken+8), t.Prompt)
	switch {
	case err != nil:
		return Tokens{}, failed(Refused, "%w", err)
	case len(ids) > api.MaxTokens:
		return Tokens{}, failed(Refused, "the prompt has %d tokens, more than %d", len(ids), api.MaxTokens)
	}
	return Tokens{IDs: ids, Plain: len(ids)}, nil
}

// bytesPerToken is what texts have about.
const bytesPerToken = 4

package gateway

import (
	"github.com/kvatlas/kvatlas/internal/text/fields"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// largerBody bounds the growth of a body by its token ids: half of the bytes that Envoy buffers by default.
const largerBody = 512 << 10

// forward returns the body of a completion with token ids in place of the text; nil if the engine must receive the
// text.
func (s *Service) forward(body []byte, chosen *api.Selection) []byte {
	t := chosen.Tokenization
	if t == nil || !t.Tokenized || t.KeepText || len(t.TokenIDs) != t.PromptTokens {
		return nil
	}
	replaced, ok := fields.ReplacePrompt(body, t.TokenIDs)
	if !ok || len(replaced) > max(len(body), largerBody) {
		return nil
	}
	s.cfg.Metrics.TokenizationAvoided(chosen.Model, len(t.TokenIDs), t.Took)
	return replaced
}

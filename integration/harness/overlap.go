package harness

import (
	"errors"
	"fmt"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Prompt is the prompt of a request or query.
type Prompt struct {
	Tokens []uint32 `json:"tokens"`
	LoRA   string   `json:"lora,omitempty"`
	Salt   string   `json:"salt,omitempty"`
	Media  []Media  `json:"media,omitempty"`
}

// Media is an image or the like in a prompt.
type Media struct {
	Identifier string `json:"identifier"`
	Offset     uint32 `json:"offset"`
	Length     uint32 `json:"length"`
}

// OverlapOf returns a worker's blocks of a prompt. An unknown model or worker has no blocks.
func OverlapOf(t testing.TB, x *Indexer, model, instance string, p Prompt) (found api.Overlap) {
	t.Helper()
	Eventually(t, fmt.Sprintf("there is a whole answer about %d tokens of %s", len(p.Tokens), model),
		func() (bool, string) {
			var a api.Answer
			q := api.Query{Model: model, Tokens: p.Tokens, LoRA: p.LoRA, CacheSalt: p.Salt}
			for _, m := range p.Media {
				q.Media = append(q.Media, events.MediaItem{Hash: events.MediaHash(m.Identifier), Offset: m.Offset,
					Length: m.Length})
			}
			err := HTTPDo(x.HTTP, "POST", "/v1/find", q, &a)
			var refused *statusError
			switch {
			case errors.As(err, &refused) && refused.status == api.CodeUnknownModel.HTTPStatus():
				return true, ""
			case err != nil:
				t.Fatal(err)
			}
			found = api.Overlap{}
			for _, o := range a.Workers {
				if string(o.Instance) == instance {
					found = o
				}
			}
			return a.Complete, fmt.Sprintf("%+v", a)
		})
	return found
}

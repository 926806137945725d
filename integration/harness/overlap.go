package harness

import (
	"errors"
	"fmt"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// Prompt is what a request brings, or is asked about.
type Prompt struct {
	Tokens []uint32 `json:"tokens"`
	LoRA   string   `json:"lora,omitempty"`
	Salt   string   `json:"salt,omitempty"`
}

// OverlapOf is what a worker has of a prompt. A model or worker that nobody has heard of yet has nothing.
func OverlapOf(t testing.TB, x *Indexer, model, instance string, p Prompt) (found api.Overlap) {
	t.Helper()
	Eventually(t, fmt.Sprintf("there is a whole answer about %d tokens of %s", len(p.Tokens), model),
		func() (bool, string) {
			var a api.Answer
			err := HTTPDo(x.HTTP, "POST", "/v1/find", api.Query{Model: model, Tokens: p.Tokens, LoRA: p.LoRA,
				CacheSalt: p.Salt}, &a)
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

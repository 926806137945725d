package tokenize

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// patience bounds every operation that does not hang.
const patience = time.Minute

func serve(t *testing.T, answer http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(answer)
	t.Cleanup(s.Close)
	return s.URL
}

// service returns a service for a model m with a source, and a function that returns the observed texts.
func service(t *testing.T, source Source, endpoints ...string) (*Service, func() []string) {
	t.Helper()
	settings := Settings{Models: map[string]Source{"m": source}}
	if err := settings.Complete(func(string) ([]byte, error) { return []byte("secret\n"), nil }); err != nil {
		t.Fatal(err)
	}
	observed := make(chan string, 1000)
	s := New(Config{
		Settings: settings, Endpoints: func(string) []string { return endpoints },
		Observe: func(model, from string, o Outcome, _ time.Duration) { observed <- model + " " + from + " " + string(o) },
	})
	return s, func() (list []string) {
		for len(observed) > 0 {
			list = append(list, <-observed)
		}
		return list
	}
}

var chat = &api.Text{Messages: api.Value(`[{"role":"user","content":"hi"}]`)}

// TestWireForms: a server returns the requests that it received, in the forms of vLLM and SGLang.
func TestWireForms(t *testing.T) {
	yes := true
	full := &api.Text{Messages: api.Value(`[{"role":"user","content":[{"type":"text","text":"hi"}]}]`),
		Tools: api.Value(`[{"b":1,"a":2}]`), ChatTemplate: "x", ChatTemplateKwargs: api.Value(`{"enable_thinking":false}`),
		AddGenerationPrompt: &yes, ReturnTokenIDs: true}
	const fullBody = `{"model":"served","messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],` +
		`"tools":[{"b":1,"a":2}],"chat_template":"x","chat_template_kwargs":{"enable_thinking":false},` +
		`"add_generation_prompt":true}`
	plain := func(ids ...uint32) Tokens { return Tokens{IDs: ids, Known: len(ids)} }
	for _, c := range []struct {
		kind   Kind
		text   *api.Text
		path   string
		body   string
		answer string
		want   Tokens
	}{
		{Tokenize, &api.Text{Prompt: "a"}, "/tokenize", `{"model":"served","prompt":"a"}`,
			`{"count":2,"max_model_len":9,"tokens":[1,2],"token_strs":null}`, plain(1, 2)},
		{Tokenize, full, "/tokenize", fullBody, `{"tokens":[7]}`, plain(7)},
		{Tokenize, &api.Text{Prompt: "a"}, "/v1/tokenize", `{"model":"served","prompt":"a"}`,
			`{"tokens":[101,7592,102],"count":3,"max_model_len":65536}`, plain(101, 7592, 102)},
		{Render, &api.Text{Prompt: "a"}, "/v1/completions/render", `{"model":"served","prompt":"a"}`,
			`[{"request_id":"cmpl-1","token_ids":[4],"features":null}]`, plain(4)},
		{Render, full, "/v1/chat/completions/render", fullBody,
			`{"request_id":"chatcmpl-1","token_ids":[5,6,6,6,7],"features":{"mm_hashes":{"image":["x","y"]},` +
				`"mm_placeholders":{"image":[{"offset":3,"length":1},{"offset":1,"length":2}]}}}`,
			Tokens{IDs: api.Tokens{5, 6, 6, 6, 7}, Known: 5, Media: []events.MediaItem{
				{Hash: events.MediaHash("y"), Offset: 1, Length: 2}, {Hash: events.MediaHash("x"), Offset: 3, Length: 1}}}},
	} {
		var asked string
		url := serve(t, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != c.path {
				http.NotFound(w, r)
				return
			}
			var body json.RawMessage
			if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
				t.Error(err)
			}
			asked = string(body)
			if got := r.Header.Get("Authorization"); got != "Bearer secret" {
				t.Errorf("Authorization: %q", got)
			}
			fmt.Fprint(w, c.answer)
		})
		source := Source{Model: "served", TokenFile: "f", TimeoutMS: int(patience.Milliseconds())}
		if c.kind == Render {
			source.Render = URLs{url + "/v1/"}
		} else {
			source.Tokenize = URLs{url}
		}
		s, _ := service(t, source)
		got, err := s.Tokenize(t.Context(), "m", c.text)
		again, errAgain := s.Tokenize(t.Context(), "m", c.text)
		if err != nil || errAgain != nil || got.Took <= 0 || !reflect.DeepEqual(again, got) {
			t.Errorf("%s: %v, %v, and from the cache %v, %v", c.path, got, err, again, errAgain)
		}
		if got.Took = 0; !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %v", c.path, got)
		}
		if asked != c.body {
			t.Errorf("%s was asked %s", c.path, asked)
		}
	}
}

// TestOutcomes covers the failures of servers.
func TestOutcomes(t *testing.T) {
	status := func(code int, text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(code)
			fmt.Fprint(w, text)
		}
	}
	banner := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			if c, _, err := http.NewResponseController(w).Hijack(); err == nil {
				fmt.Fprint(c, text)
				c.Close()
			}
		}
	}
	gone := "http://" + loopback.Reserve(t)
	for _, c := range []struct {
		source func(url string) Source
		answer http.HandlerFunc
		text   *api.Text
		want   Outcome
		says   string
	}{
		{answer: status(400, `{"error":{"message":"SECRET","code":400}}`), want: Refused, says: "/tokenize: 400 Bad Request"},
		{answer: status(400, `{"object":"error","message":"SECRET"}`), want: Refused, says: "400 Bad Request"},
		{answer: status(422, `{"detail":[{"msg":"SECRET"}]}`), want: Refused, says: "422"},
		{answer: status(307, `SECRET`), want: Refused, says: "307"},
		{answer: status(503, `SECRET`), want: Unavailable, says: "503 Service Unavailable"},
		{answer: status(404, `SECRET`), want: Refused, says: "--enable-scale-out",
			source: func(url string) Source { return Source{Render: URLs{url}} }},
		{answer: status(200, `{"count":1}`), want: Malformed, says: "no tokens"},
		{answer: status(200, `{"tokens":[-1]}`), want: Malformed, says: "not the expected JSON"},
		{answer: status(200, `SECRET`), want: Malformed, says: "not the expected JSON"},
		{answer: status(200, `{"tokens":"SECRET"}`), want: Malformed, says: "not the expected JSON"},
		{answer: status(200, `{"tokens":[98765432109876]}`), want: Malformed, says: "not the expected JSON"},
		{answer: banner("SSH-2.0-SECRET\r\n"), want: Unavailable, says: "not valid HTTP"},
		{answer: banner("HTTP/1.1 SECRET\r\n\r\n"), want: Unavailable, says: "not valid HTTP"},
		{answer: banner("HTTP/1.1 200 OK\r\nContent-Length: SECRET\r\n\r\n"), want: Unavailable, says: "not valid HTTP"},
		{answer: banner("HTTP/1.1 302 Found\r\nLocation: http://[SECRET\r\n\r\n"), want: Unavailable,
			says: "not valid HTTP"},
		{answer: status(200, `[{"token_ids":[1]},{"token_ids":[2]}]`), want: Malformed, says: "2 prompts",
			source: func(url string) Source { return Source{Render: URLs{url}} }},
		{source: func(string) Source { return Source{Tokenize: URLs{gone}} }, want: Unavailable, says: "refused"},
		{source: func(string) Source { return Source{Engines: Tokenize} }, want: Unavailable, says: "no worker"},
		{text: &api.Text{Messages: api.Value(`[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]`)},
			want: Refused, says: "render URL"},
	} {
		url := ""
		if c.answer != nil {
			url = serve(t, c.answer)
		} else {
			url = gone
		}
		if c.source == nil {
			c.source = func(url string) Source { return Source{Tokenize: URLs{url}} }
		}
		source := c.source(url)
		source.TimeoutMS = int(patience.Milliseconds())
		s, observed := service(t, source)
		if c.text == nil {
			c.text = chat
		}
		_, err := s.Tokenize(t.Context(), "m", c.text)
		if OutcomeOf(err) != c.want || err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v, want %s: %s", err, c.want, c.says)
		}
		if p := fmt.Sprint(err, s.Problems(time.Now())); strings.Contains(p, "SECRET") || strings.Contains(p, "98765") {
			t.Errorf("an error contains text from the server: %s", p)
		}
		if got := observed(); len(got) != 1 || !strings.HasSuffix(got[0], " "+string(c.want)) {
			t.Errorf("observed %q", got)
		}
		if p := s.Problems(time.Now()); len(p) != 1 || !strings.Contains(p[0], c.says) || !strings.Contains(p[0], "1 of 1") {
			t.Errorf("problems %q", p)
		}
		if p := s.Problems(time.Now().Add(lately)); len(p) != 0 {
			t.Errorf("old problems: %q", p)
		}
	}
	var back atomic.Bool
	failing := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if back.Load() {
			status(200, `{"tokens":[1,2]}`)(w, r)
		} else {
			status(503, "")(w, r)
		}
	})
	s, _ := service(t, Source{Tokenize: URLs{failing}, TimeoutMS: int(patience.Milliseconds())})
	for _, want := range []Outcome{Unavailable, OK} { // a failure does not exclude the server
		if _, err := s.Tokenize(t.Context(), "m", chat); OutcomeOf(err) != want {
			t.Errorf("%v, want %s", err, want)
		}
		back.Store(true)
	}
	s, observed := service(t, Source{Tokenize: URLs{gone}})
	if _, err := s.Tokenize(t.Context(), "other", chat); OutcomeOf(err) != NoSource {
		t.Error(err)
	}
	if got := observed(); len(got) != 1 || got[0] != "other none no_source" {
		t.Errorf("observed %q", got)
	}
}

// TestEnginesWithTheToken has engines at addresses that workers chose. A text and the token go only to the listed
// engines. Without a list and with a token, no engine receives requests. Without a token, all permitted engines do.
func TestEnginesWithTheToken(t *testing.T) {
	asked := make(chan string, 100)
	answer := func(name string) string {
		return serve(t, func(w http.ResponseWriter, r *http.Request) {
			asked <- name + " " + r.Header.Get("Authorization")
			fmt.Fprint(w, `{"tokens":[1]}`)
		})
	}
	trusted, other := answer("trusted"), answer("other")
	local := func(cidr string) *dial.Rule {
		rule, err := dial.NewRule([]string{cidr})
		if err != nil {
			t.Fatal(err)
		}
		return rule
	}
	host := strings.TrimPrefix(trusted, "http://")
	for _, c := range []struct {
		source    Source
		rule      *dial.Rule
		endpoints []string
		want      string // the servers that a text reached, or the error
	}{
		{Source{TokenFile: "f", Addresses: []string{host}}, nil, []string{other, trusted}, "trusted Bearer secret"},
		{Source{TokenFile: "f", Addresses: []string{host}}, nil, []string{other}, "1 engines of the model receive no " +
			"texts: " +
			"they are missing in addresses"},
		{Source{TokenFile: "f"}, nil, []string{other, trusted}, "has a token_file, but no addresses"},
		{Source{TokenFile: "f", Addresses: []string{}}, nil, []string{trusted}, "missing in addresses"},
		{Source{TokenFile: "f", Addresses: []string{"127.0.0.0/8"}}, nil, []string{trusted}, "trusted Bearer secret"},
		{Source{TokenFile: "f", Addresses: []string{"127.0.0.0/8"}}, nil,
			[]string{strings.Replace(trusted, "127.0.0.1", "localhost", 1)}, "missing in addresses"},
		{Source{TokenFile: "f", Addresses: []string{"LOCALHOST"}}, nil,
			[]string{strings.Replace(trusted, "127.0.0.1", "localhost", 1)}, "trusted Bearer secret"},
		{Source{Addresses: []string{host}}, nil, []string{other}, "missing in addresses"},
		{Source{}, nil, []string{trusted}, "trusted "},
		{Source{}, local("127.0.0.0/8"), []string{trusted}, "trusted "},
		{Source{}, local("10.0.0.0/8"), []string{trusted}, "not within --dial-allow"},
		{Source{}, local("10.0.0.0/8"), []string{strings.Replace(trusted, "127.0.0.1", "localhost", 1)},
			"not within --dial-allow"},
		{Source{}, nil, []string{trusted + "/admin?x="}, "no worker of the model is registered with an http endpoint"},
	} {
		c.source.Engines, c.source.TimeoutMS = Tokenize, int(patience.Milliseconds())
		s, _ := service(t, c.source, c.endpoints...)
		s.engine = dial.Client(c.rule, 0)
		_, err := s.Tokenize(t.Context(), "m", chat)
		var got string
		if err != nil {
			got = err.Error()
		}
		for len(asked) > 0 {
			got += <-asked
		}
		if err == nil && got != c.want || !strings.Contains(got, c.want) {
			t.Errorf("%+v at %q: %s, want %s", c.source, c.endpoints, got, c.want)
		}
	}
	s, _ := service(t, Source{Engines: Tokenize, TokenFile: "f"})
	if list := s.cfg.Unasked(); !slices.Equal(list, []string{"m"}) {
		t.Errorf("engines of %q are not asked", list)
	}
	s, _ = service(t, Source{Engines: Tokenize, TokenFile: "f", Addresses: []string{host}}, trusted, other)
	if list := s.cfg.Unasked(); list != nil {
		t.Errorf("engines of %q are not asked", list)
	}
	if _, err := s.Tokenize(t.Context(), "m", chat); err != nil {
		t.Error(err)
	}
	if p := s.Problems(time.Now()); len(p) != 1 || !strings.Contains(p[0], "1 engines of model m receive no texts") {
		t.Errorf("problems %q", p)
	}
}

// TestLimits: a server does not answer. A text ends at its time limit, and a concurrent text for lack of room.
func TestLimits(t *testing.T) {
	silent := func() (url string, asked, release chan bool) {
		asked, release = make(chan bool, 1), make(chan bool)
		return serve(t, func(w http.ResponseWriter, r *http.Request) {
			asked <- true
			select {
			case <-release:
			case <-r.Context().Done():
			}
			fmt.Fprint(w, `{"tokens":[1]}`)
		}), asked, release
	}
	url, _, release := silent()
	s, _ := service(t, Source{Tokenize: URLs{url}, TimeoutMS: 1})
	if _, err := s.Tokenize(t.Context(), "m", chat); OutcomeOf(err) != TimedOut || !strings.Contains(err.Error(), "1ms") {
		t.Error(err)
	}
	close(release)
	url, asked, release := silent()
	s, _ = service(t, Source{Tokenize: URLs{url}, TimeoutMS: int(patience.Milliseconds()), InFlight: 1})
	first := make(chan error)
	go func() {
		_, err := s.Tokenize(t.Context(), "m", &api.Text{Prompt: "1"})
		first <- err
	}()
	<-asked
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond) // Tokenize uses half of it
	defer cancel()
	if _, err := s.Tokenize(short, "m", &api.Text{Prompt: "2"}); OutcomeOf(err) != Busy {
		t.Error(err)
	}
	close(release)
	if err := <-first; err != nil {
		t.Error(err)
	}
}

// TestHedge: one of two servers hangs, and later refuses connections. The other answers.
func TestHedge(t *testing.T) {
	hangs := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = r.Body.Read(make([]byte, 1<<10)) // otherwise the server does not detect that the client has disconnected
		<-r.Context().Done()
	})
	var answers atomic.Int32
	ok := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		answers.Add(1)
		fmt.Fprint(w, `{"tokens":[1,2,3]}`)
	})
	s, _ := service(t, Source{Tokenize: URLs{hangs, ok}, TimeoutMS: int(patience.Milliseconds())})
	x := s.sourceOf("m")
	x.tokenizer.(*Remote).Hedge = time.Millisecond
	for i := range 10 {
		if got, err := s.Tokenize(t.Context(), "m", &api.Text{Prompt: fmt.Sprint(i)}); err != nil || len(got.IDs) != 3 {
			t.Fatal(got, err)
		}
	}
	if n := answers.Load(); n != 10 {
		t.Errorf("%d answers", n)
	}
	gone := "http://" + loopback.Reserve(t)
	s, _ = service(t, Source{Engines: Tokenize, TimeoutMS: int(patience.Milliseconds())}, "tcp://nowhere", gone, ok,
		gone+"/v1")
	for i := range 4 {
		if got, err := s.Tokenize(t.Context(), "m", &api.Text{Prompt: fmt.Sprint(i)}); err != nil || len(got.IDs) != 3 {
			t.Fatal(got, err)
		}
	}
}

// TestCache tokenizes a text twice, and then exceeds the room.
func TestCache(t *testing.T) {
	var asked atomic.Int32
	url := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		fmt.Fprint(w, `{"tokens":[1,2,3]}`)
	})
	room := int64(2*size(Tokens{IDs: make(api.Tokens, 3)})) + 8
	s, observed := service(t, Source{Tokenize: URLs{url}, CacheBytes: &room, TimeoutMS: int(patience.Milliseconds())})
	ask := func(text *api.Text) {
		t.Helper()
		if got, err := s.Tokenize(t.Context(), "m", text); err != nil || len(got.IDs) != 3 {
			t.Fatal(got, err)
		}
	}
	again := *chat
	again.ReturnTokenIDs = true // does not change the tokens
	ask(chat)
	ask(&again)
	ask(&api.Text{Prompt: string(chat.Messages)}) // another text
	ask(chat)
	if got, n := observed(), asked.Load(); n != 2 || !strings.HasSuffix(got[1], " cached") {
		t.Errorf("asked %d times: %q", n, got)
	}
	ask(&api.Text{Prompt: "third"}) // drops the prompt
	ask(chat)
	ask(&api.Text{Prompt: string(chat.Messages)})
	if n := asked.Load(); n != 4 {
		t.Errorf("asked %d times", n)
	}
	c := s.sourceOf("m").cache
	if c.bytes > room || c.lru.Len() != 2 {
		t.Errorf("%d bytes in %d entries", c.bytes, c.lru.Len())
	}
}

// TestSettings covers invalid settings.
func TestSettings(t *testing.T) {
	for text, says := range map[string]string{
		`{"models":{"m":{}}}`: "model m: 0 of render, tokenize, engines and path are set",
		`{"models":{"m":{"render":"http://a:1","tokenize":["http://b:1"]}}}`: "2 of render, tokenize, engines and path",
		`{"models":{"m":{"render":"a:1"}}}`:                                  "is not http://HOST:PORT",
		`{"models":{"m":{"render":"http://u:geheim@a:1"}}}`:                  "is not http://HOST:PORT",
		`{"models":{"m":{"render":"u:geheim@a:1"}}}`:                         "is not http://HOST:PORT",
		`{"models":{"m":{"render":"http://u:geheim@a:%zz"}}}`:                "is not http://HOST:PORT",
		`{"models":{"m":{"engines":"both"}}}`:                                `engines is "both"`,
		`{"models":{"m":{"engines":"render","timeout_ms":-1}}}`:              "negative",
		`{"models":{"m":{"engines":"render","token_file":"none"}}}`:          "token_file: no such file",
		`{"models":{"m":{"engines":"render","addresses":["http://a/b"]}}}`:   "addresses:",
		`{"models":{"m":{"render":"http://a:1","addresses":["a:1"]}}}`:       "addresses is only for engines",
		`{"default":{"render":"http://a:1"}}`:                                "default: only engines is supported",
	} {
		var s Settings
		if err := json.Unmarshal([]byte(text), &s); err != nil {
			t.Fatal(err)
		}
		err := s.Complete(func(string) ([]byte, error) { return nil, fmt.Errorf("no such file") })
		if err == nil || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "geheim") {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// TestDefault: the default source serves only existing models.
func TestDefault(t *testing.T) {
	url := serve(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"tokens":[1]}`) })
	s := New(Config{Settings: Settings{Default: &Source{Engines: Tokenize}}, Endpoints: func(model string) []string {
		if model == "there" {
			return []string{url}
		}
		return nil
	}})
	for model, want := range map[string]Outcome{"there": OK, "not": NoSource} {
		if _, err := s.Tokenize(t.Context(), model, chat); OutcomeOf(err) != want {
			t.Errorf("%s: %v", model, err)
		}
	}
	if len(s.models) != 1 || !s.Serves() || (*Service)(nil).Serves() || New(Config{}).Serves() {
		t.Errorf("%d models", len(s.models))
	}
}

// byteVocabulary is a tokenizer.json of bytes: a text has a token for each byte.
func byteVocabulary(t *testing.T) []byte {
	t.Helper()
	vocab := map[string]int{}
	for b, r := 0, rune(256); b < 256; b++ {
		if '!' <= b && b <= '~' || 0xa1 <= b && b <= 0xac || 0xae <= b {
			vocab[string(rune(b))] = b
		} else {
			vocab[string(r)] = b
			r++
		}
	}
	file, err := json.Marshal(map[string]any{
		"model": map[string]any{"type": "BPE", "vocab": vocab, "merges": []string{}},
		"pre_tokenizer": map[string]any{"type": "Sequence", "pretokenizers": []any{map[string]any{"type": "Split",
			"pattern": map[string]any{"Regex": `\p{N}{1,3}`}, "behavior": "Isolated"}, map[string]any{"type": "ByteLevel"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// TestLocal: with only a tokenizer.json, messages are refused.
func TestLocal(t *testing.T) {
	file := byteVocabulary(t)
	settings := Settings{Models: map[string]Source{"m": {Path: "f", TimeoutMS: int(patience.Milliseconds())}}}
	read := func(path string) ([]byte, error) {
		if path == "f" {
			return file, nil
		}
		return nil, fs.ErrNotExist
	}
	if err := settings.Complete(read); err != nil {
		t.Fatal(err)
	}
	s := New(Config{Settings: settings})
	got, err := s.Tokenize(t.Context(), "m", &api.Text{Prompt: "a é"})
	got.Took = 0
	if want := (Tokens{IDs: api.Tokens{'a', ' ', 0xc3, 0xa9}, Known: 4}); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	_, err = s.Tokenize(t.Context(), "m", chat)
	if OutcomeOf(err) != Refused || !strings.Contains(err.Error(), "render") {
		t.Error(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	local := *settings.Models["m"].local
	if local.chat, err = (&renderer{}).withTemplate(t.Context(), "x"); err != nil {
		t.Fatal(err)
	}
	for _, text := range []*api.Text{{Prompt: "a"}, chat} { // the template is too short for a check of the context
		if _, err := local.Tokenize(ended, text); !errors.Is(err, context.Canceled) || OutcomeOf(err) != TimedOut {
			t.Error(err)
		}
	}
	if err := settings.Complete(func(string) ([]byte, error) { return []byte("{}"), nil }); err == nil ||
		!strings.Contains(err.Error(), "give the model a render or tokenize URL") {
		t.Error(err)
	}
}

// TestMedia: the usable tokens end before the first item with an unknown hash.
func TestMedia(t *testing.T) {
	ids := make(api.Tokens, 10)
	item := func(identifier string, offset, length uint32) events.MediaItem {
		return events.MediaItem{Hash: events.MediaHash(identifier), Offset: offset, Length: length}
	}
	for _, c := range []struct {
		hashes, places string
		known          int
		media          []events.MediaItem
	}{
		{`{}`, `{}`, 10, nil},
		{`{"image":["x"],"audio":["y"]}`, `{"image":[{"offset":7,"length":3}],"audio":[{"offset":1,"length":6}]}`, 10,
			[]events.MediaItem{item("y", 1, 6), item("x", 7, 3)}},
		{`null`, `{"image":[{"offset":4,"length":1}]}`, 4, nil},
		{`{"image":["x"]}`, `{"image":[{"offset":4,"length":1},{"offset":6,"length":1}]}`, 4, nil},
		{`{"image":["x",null]}`, `{"image":[{"offset":4,"length":1},{"offset":6,"length":1}]}`, 6,
			[]events.MediaItem{item("x", 4, 1)}},
		{`{"image":[null,"x"]}`, `{"image":[{"offset":4,"length":1},{"offset":6,"length":1}]}`, 4, nil},
		{`{"a":["x","y"],"b":["z"]}`,
			`{"a":[{"offset":0,"length":2},{"offset":4,"length":4}],"b":[{"offset":6,"length":1}]}`, 4,
			[]events.MediaItem{item("x", 0, 2)}},
		{`{"image":["x"]}`, `{"image":[{"offset":8,"length":3}]}`, 8, nil},
		{`{"image":["x"]}`, `{"image":[{"offset":80,"length":3}]}`, 10, nil},
	} {
		text, err := json.Marshal(ids)
		if err != nil {
			t.Fatal(err)
		}
		r := &Remote{Kind: Render}
		got, err := r.read(fmt.Appendf(nil, `{"token_ids":%s,"features":{"mm_hashes":%s,"mm_placeholders":%s}}`, text,
			c.hashes, c.places))
		if err != nil || got.Known != c.known || !slices.Equal(got.Media, c.media) {
			t.Errorf("%s at %s: %+v, %v; want %d tokens and %v", c.hashes, c.places, got, err, c.known, c.media)
		}
	}
}

package tokenize

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Kind is the kind of a server's API.
type Kind string

// The kinds.
const (
	Render   Kind = "render"
	Tokenize Kind = "tokenize"
)

// Remote tokenizes texts with requests to servers.
type Remote struct {
	Kind   Kind
	Model  string // name of the model on the servers
	Token  string // bearer token; may be empty
	HTTP   *http.Client
	Hedge  time.Duration // delay before a hedged request to a second server
	Budget *rpc.Budget   // of hedged requests

	// URLs returns the servers, http://HOST:PORT, for each text. The error is the reason for an empty list.
	URLs func() ([]string, error)

	turn atomic.Uint64
	old  sync.Map // servers without the path of a first form

	versions sync.Map // of [versionAt], by URL
}

// Bounds of one text.
const (
	mostTries = 3        // requests per text
	maxReply  = 64 << 20 // bytes; renders of images contain the pixels
)

// body returns the body of a request, with the fields of the text and of its Request.
func body(model string, t *api.Text) ([]byte, error) {
	of := struct {
		Model string `json:"model"`
		api.Text
	}{model, *t}
	of.API, of.Request, of.ReturnTokenIDs = "", nil, false
	text, err := json.Marshal(of)
	if err == nil && t.Request != nil {
		text = append(append(text[:len(text)-1], ','), t.Request[1:]...)
	}
	return text, err
}

// reply is the union of the servers' answers.
type reply struct {
	Tokens   api.Tokens `json:"tokens"`
	TokenIDs api.Tokens `json:"token_ids"`
	Features *features  `json:"features"`
}

// features lists the items of a prompt and their positions, by modality.
type features struct {
	Hashes       map[string][]*string `json:"mm_hashes"`
	Placeholders map[string][]struct {
		Offset uint32 `json:"offset"`
		Length uint32 `json:"length"`
	} `json:"mm_placeholders"`
}

// Tokenize sends requests to the servers, in sequence or hedged.
func (r *Remote) Tokenize(ctx context.Context, t *api.Text) (Tokens, error) {
	urls, err := r.URLs()
	if err != nil {
		return Tokens{}, err
	}
	forms, err := r.forms(t)
	if err != nil {
		return Tokens{}, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // cancels the losing requests
	type end struct {
		tokens Tokens
		err    error
	}
	ended := make(chan end, mostTries)
	first, sent, open := int(r.turn.Add(1)%uint64(len(urls))), 0, 0
	send := func() {
		base := urls[(first+sent)%len(urls)]
		sent++
		open++
		go func() {
			tokens, err := r.send(ctx, base, forms, agentAPI(t))
			ended <- end{tokens, err}
		}()
	}
	most := min(len(urls), mostTries)
	r.Budget.Earn()
	send()
	hedge := time.NewTimer(r.Hedge)
	defer hedge.Stop()
	for {
		select {
		case e := <-ended:
			open--
			outcome := OutcomeOf(e.err)
			if ctx.Err() == nil && sent < most && (outcome == Unavailable || outcome == TimedOut) {
				send()
			} else if open == 0 || outcome != Unavailable {
				return e.tokens, e.err
			}
		case <-hedge.C:
			if sent < most && r.Budget.Spend() {
				send()
			}
		case <-ctx.Done():
			return Tokens{}, ctx.Err()
		}
	}
}

// form is a form of a request.
type form struct {
	path string
	body func() ([]byte, error) // encodes the body at the first call
}

// forms returns the forms of a request, the first choice first. The second form is for servers without the path of the
// first form.
func (r *Remote) forms(t *api.Text) ([]form, error) {
	encode := func(t *api.Text, err error) func() ([]byte, error) {
		return sync.OnceValues(func() ([]byte, error) {
			if err != nil {
				return nil, err
			}
			return body(r.Model, t)
		})
	}
	switch {
	case r.Kind == Render && agentAPI(t):
		return []form{{"/v1/" + t.API + "/render", encode(t, nil)}, {chatRender, sync.OnceValues(func() ([]byte, error) {
			return encode(convertedForServers(t))()
		})}}, nil
	case r.Kind == Render && t.Messages != nil:
		return []form{{chatRender, encode(t, nil)}}, nil
	case r.Kind == Render:
		return []form{{"/v1/completions/render", encode(t, nil)}}, nil
	case agentAPI(t):
		chat, err := convertedForServers(t)
		if err != nil {
			return nil, err
		}
		t = chat
	}
	if hasMedia(t.Messages) {
		return nil, failed(Refused, "messages have other parts than text, and a tokenizer does not return the positions of "+
			"their tokens; give the model a render URL")
	}
	t, err := forTokenizer(t)
	text := encode(t, err)
	return []form{{"/tokenize", text}, {"/v1/tokenize", text}}, err
}

// chatRender is the path of the renderer of chats.
const chatRender = "/v1/chat/completions/render"

// refusal returns an error as an [Error].
func refusal(err error) error {
	if e, is := errors.AsType[*Error](err); is {
		return e
	}
	return failed(Refused, "%w", err)
}

// server is a form that a server does not have.
type server struct{ base, path string }

// versionAt is the version of a server.
type versionAt struct {
	major, minor int // zero for a server that is not vLLM
	at           time.Time
}

// versionLife is the time for which a version is valid, because servers restart with other versions.
const versionLife = time.Minute

// checkConversion refuses servers with an unknown conversion of requests of agents' APIs, so with possibly different
// tokens. The conversion is known for vLLM 0.32 and later.
func (r *Remote) checkConversion(ctx context.Context, base string) error {
	known, _ := r.versions.Load(base)
	v, _ := known.(versionAt)
	if time.Since(v.at) > versionLife {
		answer, status, err := r.call(ctx, http.MethodGet, base, "/version", nil)
		switch {
		case err != nil && ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			return failed(Unavailable, "%s/version: %w", base, err)
		}
		v = versionAt{at: time.Now()}
		var said struct {
			Version string `json:"version"`
		}
		if status == http.StatusOK && strictjson.Unmarshal(answer, &said) == nil {
			_, _ = fmt.Sscanf(said.Version, "%d.%d", &v.major, &v.minor)
		}
		r.versions.Store(base, v)
	}
	if v.major == 0 && v.minor < 32 {
		return failed(Refused, "%s/version names no vLLM from 0.32 on, so the server's treatment of Responses and Messages "+
			"is unknown; give the model a renderer of vLLM 0.33", base)
	}
	return nil
}

// send sends a request to one server. agent means a request of an agents' API.
func (r *Remote) send(ctx context.Context, base string, forms []form, agent bool) (Tokens, error) {
	if agent {
		if err := r.checkConversion(ctx, base); err != nil {
			return Tokens{}, err
		}
	}
	if _, old := r.old.Load(server{base, forms[0].path}); old && len(forms) > 1 {
		forms = forms[1:]
	}
	var path string
	var answer []byte
	var status int
	for i, f := range forms {
		text, err := f.body()
		if err != nil {
			return Tokens{}, refusal(err)
		}
		path = f.path
		if answer, status, err = r.call(ctx, http.MethodPost, base, path, text); err != nil && ctx.Err() != nil {
			return Tokens{}, ctx.Err()
		} else if err != nil {
			return Tokens{}, failed(Unavailable, "%s%s: %w", base, path, err)
		}
		if status != http.StatusNotFound {
			if i > 0 && status == http.StatusOK {
				r.old.Store(server{base, forms[0].path}, true)
			}
			break
		}
	}
	switch {
	case status >= 500: // errors contain no text of the answer: a client may have named the server
		return Tokens{}, failed(Unavailable, "%s%s: %d %s", base, path, status, http.StatusText(status))
	case status == http.StatusNotFound && r.Kind == Render:
		return Tokens{}, failed(Refused, "%s%s: 404; start vLLM with --enable-scale-out, or as vllm launch render",
			base, path)
	case status != http.StatusOK:
		return Tokens{}, failed(Refused, "%s%s: %d %s", base, path, status, http.StatusText(status))
	}
	tokens, err := r.read(answer)
	if err != nil {
		return Tokens{}, failed(Malformed, "%s%s: %w", base, path, err)
	}
	return tokens, nil
}

func (r *Remote) call(ctx context.Context, method, base, path string, text []byte) (answer []byte, status int,
	err error) {
	target, err := url.JoinPath(base, path)
	if err != nil {
		return nil, 0, errors.New("the address is not a URL")
	}
	q, err := http.NewRequestWithContext(ctx, method, target, bytes.NewReader(text))
	if err != nil {
		return nil, 0, errors.New("the address is not a URL")
	}
	q.Header.Set("Content-Type", "application/json")
	if trace := rpc.Traceparent(ctx); trace != "" {
		q.Header.Set(rpc.HeaderTrace, trace)
	}
	if r.Token != "" {
		q.Header.Set("Authorization", "Bearer "+r.Token)
	}
	a, err := r.HTTP.Do(q)
	if err != nil {
		return nil, 0, dial.Fixed(err)
	}
	defer a.Body.Close()
	answer, err = io.ReadAll(io.LimitReader(a.Body, maxReply+1))
	if err == nil && len(answer) > maxReply {
		return nil, 0, fmt.Errorf("the answer has more than %d bytes", maxReply)
	}
	return answer, a.StatusCode, dial.Fixed(err)
}

// errAnswer replaces the errors of package json, which contain parts of the answer.
var errAnswer = errors.New("the answer is not the expected JSON")

// read decodes an answer.
func (r *Remote) read(answer []byte) (Tokens, error) {
	var list []reply
	if trimmed := bytes.TrimSpace(answer); len(trimmed) > 0 && trimmed[0] == '[' {
		if strictjson.Unmarshal(answer, &list) != nil {
			return Tokens{}, errAnswer
		}
	} else {
		list = make([]reply, 1)
		if strictjson.Unmarshal(answer, &list[0]) != nil {
			return Tokens{}, errAnswer
		}
	}
	if len(list) != 1 {
		return Tokens{}, fmt.Errorf("the answer has %d prompts, not one", len(list))
	}
	out := Tokens{IDs: list[0].TokenIDs}
	if r.Kind == Tokenize {
		out.IDs = list[0].Tokens
	}
	switch {
	case out.IDs == nil:
		return Tokens{}, errors.New("the answer has no tokens")
	case len(out.IDs) > api.MaxTokens:
		return Tokens{}, fmt.Errorf("the answer has more than %d tokens", api.MaxTokens)
	}
	out.Known = len(out.IDs)
	if list[0].Features != nil {
		out.readMedia(list[0].Features)
	}
	return out, nil
}

// readMedia reads the items with a hash, up to the first item without one.
func (t *Tokens) readMedia(f *features) {
	for modality, places := range f.Placeholders {
		hashes := f.Hashes[modality]
		for i, p := range places {
			if len(hashes) != len(places) || hashes[i] == nil || p.Length == 0 {
				t.Known = min(t.Known, int(p.Offset))
				continue
			}
			t.Media = append(t.Media, events.MediaItem{Hash: events.MediaHash(*hashes[i]), Offset: p.Offset, Length: p.Length})
		}
	}
	slices.SortFunc(t.Media, func(a, b events.MediaItem) int { return cmp.Compare(a.Offset, b.Offset) })
	end := 0
	for i, item := range t.Media {
		first := i
		if int(item.Offset) < end {
			first = i - 1 // the engine's hash of two overlapping items is unknown
		}
		end = int(item.Offset) + int(item.Length)
		if first < i || end > t.Known || i == api.MaxMedia {
			t.Known, t.Media = min(t.Known, int(t.Media[first].Offset)), t.Media[:first]
			return
		}
	}
}

// hasMedia reports whether messages have parts other than text.
func hasMedia(messages api.Value) bool {
	if !bytes.Contains(messages, []byte(`"type"`)) { // most messages
		return false
	}
	var list []struct {
		Content json.RawMessage `json:"content"`
	}
	if strictjson.Unmarshal(messages, &list) != nil {
		return false // the server reports the error
	}
	for _, m := range list {
		var parts []struct {
			Type string `json:"type"`
		}
		if strictjson.Unmarshal(m.Content, &parts) != nil {
			continue // a text part
		}
		for _, p := range parts {
			if p.Type != "text" {
				return true
			}
		}
	}
	return false
}

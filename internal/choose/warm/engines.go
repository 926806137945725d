package warm

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/pkg/events"
)

const (
	// mostAnswers bounds the requests under way.
	mostAnswers = 4

	// mostAnswer bounds the bytes read from an answer.
	mostAnswer = 1 << 16

	// DefaultTimeout is the longest wait for an engine.
	DefaultTimeout = time.Minute
)

// ErrBusy: too many requests of this process wait for engines. Retry later.
var ErrBusy = errors.New("too many copies are under way; retry later")

// rankHeader names the data-parallel rank of a request, in vLLM's form.
const rankHeader = "X-Data-Parallel-Rank"

// Engines sends completions to engines. It is safe for concurrent use.
type Engines struct {
	http  *http.Client
	slots chan struct{}
}

// NewEngines returns a client with connections within the rule; nil permits every address.
func NewEngines(rule *dial.Rule) *Engines {
	return &Engines{http: dial.Client(rule, DefaultTimeout), slots: make(chan struct{}, mostAnswers)}
}

// Target is the engine of a rank.
type Target struct {
	Endpoint string // the registered serving address
	Model    string
	Rank     *events.Rank // nil: the engine has one rank
}

// completion is the body of a request: the form of OpenAI's completions, which vLLM and SGLang serve.
type completion struct {
	Model     string   `json:"model"`
	Prompt    []uint32 `json:"prompt"`
	MaxTokens int      `json:"max_tokens"`
	CacheSalt string   `json:"cache_salt,omitempty"`
}

// Complete sends a prompt with one token of output, and waits for the answer. Errors contain no words of the engine.
func (e *Engines) Complete(ctx context.Context, to Target, p *Prompt) error {
	select {
	case e.slots <- struct{}{}:
		defer func() { <-e.slots }()
	default:
		return ErrBusy
	}
	url, err := completions(to.Endpoint)
	if err != nil {
		return err
	}
	body, err := json.Marshal(&completion{Model: cmp.Or(p.LoRA, to.Model), Prompt: p.Tokens, MaxTokens: 1,
		CacheSalt: p.Salt})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return dial.Fixed(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if to.Rank != nil {
		req.Header.Set(rankHeader, strconv.FormatUint(uint64(*to.Rank), 10))
	}
	answer, err := e.http.Do(req)
	if err != nil {
		return dial.Fixed(err)
	}
	defer answer.Body.Close()
	if _, err := io.Copy(io.Discard, io.LimitReader(answer.Body, mostAnswer)); err != nil {
		return dial.Fixed(err)
	}
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("the engine answered with status %d", answer.StatusCode)
	}
	return nil
}

// completions returns the URL of an engine's completions.
func completions(endpoint string) (string, error) {
	if err := dial.CheckServing(endpoint); err != nil {
		return "", err
	}
	base := strings.TrimSuffix(strings.TrimSuffix(endpoint, "/"), "/v1")
	scheme, _, isURL := strings.Cut(base, "://")
	switch {
	case !isURL:
		base = "http://" + base
	case scheme != "http" && scheme != "https":
		return "", errors.New("the serving address is not of HTTP")
	}
	return base + "/v1/completions", nil
}

package gateway

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/text/fields"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Transfer configures the requests that the gateway itself sends to prefill workers, in the form of vLLM's proxies: the
// prefill worker computes the prompt and describes the transfer of its blocks, and the decode worker gets the request
// with the description (kv_transfer_params).
type Transfer struct {
	Rule    *dial.Rule    // permitted addresses; nil permits all
	Timeout time.Duration // of a request to a prefill worker, with its wait for a place; default 60 s

	// Most is the number of concurrent requests, and Waiting is the number of requests that wait for a place. The
	// decode worker computes the prompts of further requests. Default 1,024 each.
	Most, Waiting int
}

// PrefillOutcome is the end of a request to a prefill worker.
type PrefillOutcome string

// The outcomes. After all except the first two, the decode worker computes the prompt.
const (
	PrefillTransfer   PrefillOutcome = "transfer"    // the answer describes a transfer of blocks
	PrefillNoTransfer PrefillOutcome = "no_transfer" // the answer does not; the engines may share a store

	PrefillRefused PrefillOutcome = "refused" // no connection to the worker
	PrefillBroken  PrefillOutcome = "broken"  // the connection ended before the whole answer
	PrefillStatus  PrefillOutcome = "status"  // an answer with a status of 5xx
	PrefillTimeout PrefillOutcome = "timeout" // no answer in time

	PrefillRejected    PrefillOutcome = "rejected"    // another status than 2xx and 5xx
	PrefillMalformed   PrefillOutcome = "malformed"   // the answer is not a JSON object
	PrefillTooLarge    PrefillOutcome = "too_large"   // the answer, or the request with its description
	PrefillBusy        PrefillOutcome = "busy"        // no place for the request, or no memory
	PrefillDenied      PrefillOutcome = "denied"      // the rule forbids the address
	PrefillCanceled    PrefillOutcome = "canceled"    // the client has disconnected
	PrefillUnsupported PrefillOutcome = "unsupported" // not sent: vLLM cannot transfer the blocks of such a request
)

// prefilled reports whether the prefill worker has computed the prompt.
func (o PrefillOutcome) prefilled() bool { return o == PrefillTransfer || o == PrefillNoTransfer }

// result returns the result of the request at the worker; empty: unknown.
func (o PrefillOutcome) result() api.Result {
	switch o {
	case PrefillTransfer, PrefillNoTransfer:
		return api.ResultOK
	case PrefillRefused, PrefillBroken, PrefillStatus, PrefillTimeout:
		return api.Result(o)
	}
	return ""
}

const (
	// maxPrefillAnswer bounds the answer of a prefill worker. An answer has one token, the prompt with echo, and the
	// numbers of the prompt's blocks.
	maxPrefillAnswer = 4 << 20

	// idlePrefill is the age of an idle connection to a prefill worker at its end. vLLM closes such a connection after
	// five seconds.
	idlePrefill = 3 * time.Second

	idlePerWorker = 64 // idle connections to a prefill worker
)

// transfer sends requests to prefill workers. It is safe for concurrent use.
type transfer struct {
	cfg     Transfer
	http    *http.Client
	bodies  *web.Intake
	places  chan struct{} // a value for each running request
	waiting atomic.Int64
}

// newTransfer returns a transfer; nil without a configuration.
func newTransfer(cfg *Transfer, bodies *web.Intake) *transfer {
	if cfg == nil {
		return nil
	}
	t := &transfer{cfg: *cfg, bodies: bodies}
	t.cfg.Timeout = cmp.Or(t.cfg.Timeout, time.Minute)
	t.cfg.Most, t.cfg.Waiting = cmp.Or(t.cfg.Most, 1024), cmp.Or(t.cfg.Waiting, 1024)
	t.places = make(chan struct{}, t.cfg.Most)
	t.http = dial.Client(t.cfg.Rule, 0)
	transport := t.http.Transport.(*http.Transport)
	transport.DialContext, transport.Proxy = dial.Quick(t.cfg.Rule).DialContext, nil
	transport.MaxIdleConns, transport.MaxIdleConnsPerHost = t.cfg.Most, idlePerWorker
	transport.IdleConnTimeout, transport.DisableCompression = idlePrefill, true
	return t
}

// part is the result of a request to a prefill worker.
type part struct {
	outcome  PrefillOutcome
	transfer []byte // the description of the transfer, as JSON; nil without a description

	cached   uint64 // reused tokens of the prompt
	reported bool   // the answer has cached
}

// enter waits for a place. The caller must call leave if ok.
func (t *transfer) enter(ctx context.Context) (ok bool) {
	select {
	case t.places <- struct{}{}:
		return true
	default:
	}
	defer t.waiting.Add(-1)
	if t.waiting.Add(1) > int64(t.cfg.Waiting) {
		return false
	}
	select {
	case t.places <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

func (t *transfer) leave() { <-t.places }

// send sends a request to a prefill worker. The end of ctx cancels the request.
func (t *transfer) send(ctx context.Context, url string, header http.Header, body []byte) part {
	bounded, cancel := context.WithTimeout(ctx, t.cfg.Timeout)
	defer cancel()
	if !t.enter(bounded) {
		if ctx.Err() != nil {
			return part{outcome: PrefillCanceled}
		}
		return part{outcome: PrefillBusy}
	}
	defer t.leave()
	held := t.bodies.Begin(func() {}) // complete in a moment, so it need not make room for others
	defer held.End()
	if held.Add(len(body)) != nil || held.Complete() != nil {
		return part{outcome: PrefillBusy}
	}
	answer, status, err := t.exchange(bounded, held, url, header, body)
	switch {
	case ctx.Err() != nil:
		return part{outcome: PrefillCanceled}
	case err != nil:
		return part{outcome: failed(err)}
	case status >= 500 && status != http.StatusNotImplemented:
		return part{outcome: PrefillStatus}
	case status < 200 || status > 299:
		return part{outcome: PrefillRejected}
	}
	p := part{outcome: PrefillTransfer}
	var ok bool
	if p.transfer, ok = fields.Transfer(answer); !ok {
		return part{outcome: PrefillMalformed}
	}
	if p.transfer == nil {
		p.outcome = PrefillNoTransfer
	}
	p.cached, p.reported = new(usage).read(answer)
	return p
}

// errors of an exchange.
var (
	errTooLarge = errors.New("the answer is too large")
	errNoMemory = errors.New("too many bodies are in memory")
)

// exchange sends a request and reads the answer. held counts the bytes of both.
func (t *transfer) exchange(
	ctx context.Context, held *web.Arrival, url string, header http.Header, body []byte,
) (answer []byte, status int, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return nil, 0, err
	}
	r.Header = header
	r.Header["X-Idempotency-Key"] = nil // net/http repeats the request if an idle connection breaks, and sends no header
	reply, err := t.http.Do(r)
	if err != nil {
		return nil, 0, err
	}
	defer reply.Body.Close()
	chunk := make([]byte, 32<<10)
	for {
		n, err := reply.Body.Read(chunk)
		if len(answer)+n > maxPrefillAnswer {
			return nil, 0, errTooLarge
		}
		if n > 0 && held.Add(n) != nil {
			return nil, 0, errNoMemory
		}
		answer = append(answer, chunk[:n]...)
		if err == io.EOF {
			return answer, reply.StatusCode, nil
		} else if err != nil {
			return nil, 0, err
		}
	}
}

// failed returns the outcome of an exchange with an error.
func failed(err error) PrefillOutcome {
	var op *net.OpError
	switch {
	case errors.Is(err, errTooLarge):
		return PrefillTooLarge
	case errors.Is(err, errNoMemory):
		return PrefillBusy
	case errors.Is(err, dial.ErrDenied):
		return PrefillDenied
	case errors.As(err, &op) && op.Op == "dial":
		return PrefillRefused
	case errors.Is(err, context.DeadlineExceeded):
		return PrefillTimeout
	}
	return PrefillBroken
}

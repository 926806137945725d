package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// maxReply limits the body of a reply, in bytes.
const maxReply = 1 << 30

// HTTP returns a client of the nodes at the URLs, such as http://127.0.0.1:8090. Requests and retries go to the URLs in
// turn.
func HTTP(urls []string, o Options) (*Client, error) {
	if len(urls) == 0 {
		return nil, api.Errorf(api.CodeMalformed, "no URL of an indexer is given")
	}
	t := &httpTransport{token: o.Token, client: o.HTTP}
	if t.client == nil {
		t.client = http.DefaultClient
	}
	for i, text := range urls {
		u, err := url.Parse(text)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" {
			shown := fmt.Sprintf("%.100q", text)
			if strings.ContainsAny(text, "@?") { // the URL may contain a password or a key
				shown = fmt.Sprintf("URL %d of %d", i+1, len(urls))
			}
			return nil, api.Errorf(api.CodeMalformed, "%s is not an http:// or https:// URL of an indexer", shown)
		}
		t.urls = append(t.urls, strings.TrimSuffix(u.String(), "/"))
	}
	return newClient(t, o), nil
}

type httpTransport struct {
	urls   []string
	token  string
	client *http.Client
	turn   atomic.Uint64
	hedges rpc.Budget
}

func (t *httpTransport) send(ctx context.Context, r *request, patience time.Duration) (outcome, error) {
	if r.ctx == nil {
		r.ctx, r.cancel = context.WithCancel(ctx)
		r.attempt = int(t.turn.Add(1) % uint64(len(t.urls)))
	}
	op := api.OperationOf(r.op)
	if op == nil || len(op.Routes) == 0 {
		return outcome{}, api.Errorf(api.CodeUnknownOperation, "%s is not served over HTTP", r.op)
	}
	to := op.Routes[len(op.Routes)-1]
	path := strings.Replace(to.Path, "{instance}", url.PathEscape(string(r.about)), 1)
	at := t.urls[r.attempt%len(t.urls)] + path
	req, err := http.NewRequestWithContext(r.ctx, to.Method, at, bytes.NewReader(r.body))
	if err != nil {
		return outcome{}, failed(api.CodeMalformed, err, "the URL of the indexer")
	}
	r.attempt++
	req.Header.Set("Content-Type", api.MsgPack)
	req.Header.Set(rpc.HeaderDeadline, strconv.FormatInt(max(patience.Milliseconds(), 1), 10))
	if trace := rpc.Traceparent(ctx); trace != "" {
		req.Header.Set(rpc.HeaderTrace, trace)
	}
	if t.token != "" {
		req.Header.Set("Authorization", "Bearer "+t.token)
	}
	outcomes := r.outcomes
	go func() {
		o := t.do(req)
		select {
		case outcomes <- o:
		default: // dropped, as in [request.put]
		}
	}()
	return outcome{}, nil
}

// do sends a request and waits for the reply.
func (t *httpTransport) do(req *http.Request) outcome {
	reply, err := t.client.Do(req)
	if err == nil {
		defer reply.Body.Close()
		var body []byte
		if body, err = io.ReadAll(io.LimitReader(reply.Body, maxReply)); err == nil {
			return replied(reply, body)
		}
	}
	o := outcome{again: AgainLost, err: failed(api.CodeUnavailable, err, "cannot reach the indexer")}
	switch dial, is := errors.AsType[*net.OpError](err); {
	case is && dial.Op == "dial":
		o.again = AgainAbsent
	case errors.As(err, new(*tls.CertificateVerificationError)), errors.Is(err, context.Canceled):
		o.again = ""
	}
	return o
}

// replied converts an HTTP reply to an outcome.
func replied(reply *http.Response, body []byte) outcome {
	o := outcome{reply: body}
	form, known := api.ContentType(reply.Header.Get("Content-Type"))
	if reply.StatusCode == http.StatusServiceUnavailable {
		o.again = refusal(form, body)
	}
	switch {
	case known && form == api.MsgPack && len(body) > 0:
	case known && len(body) > 0: // a JSON error: the server failed before it read the format of the request
		var e api.ErrorBody
		if api.Unmarshal(api.JSON, body, &e) == nil && e.Error != nil {
			o.err = e.Error
			break
		}
		fallthrough
	default:
		code := api.CodeInternal
		if o.again != "" {
			code = api.CodeUnavailable
		}
		o.err = api.Errorf(code, "%s replied %s, which is not a status of an indexer: check the URL",
			reply.Request.URL.Host, reply.Status)
	}
	if o.err != nil {
		o.reply = nil
	}
	return o
}

// refusal returns the reason for a retry after a reply with status 503. A reply without a usable worker is final,
// because all nodes reply the same.
func refusal(form string, body []byte) string {
	var e api.ErrorBody
	if api.Unmarshal(form, body, &e) == nil && e.Error != nil && e.Error.Code == api.CodeNoWorkers {
		return ""
	}
	return AgainRefused
}

func (t *httpTransport) end(r *request) {
	if r.cancel != nil {
		r.cancel()
	}
	r.outcomes = nil // attempts in flight still use the channel
}

func (t *httpTransport) refused(*request) error { return nil }
func (t *httpTransport) lost() <-chan struct{}  { return nil }
func (t *httpTransport) budget() *rpc.Budget    { return &t.hedges }
func (t *httpTransport) close()                 {}

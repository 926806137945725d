package harness

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Request sends a request with a JSON body, or without a body for GET. A query is repeated while the machine is [busy].
func Request(base, method, path, body string) (status int, reply string, err error) {
	question := method == "GET" || path == "/v1/find" || strings.HasPrefix(path, "/query")
	for deadline := time.Now().Add(Patience); ; time.Sleep(20 * time.Millisecond) {
		status, reply, err = callOnce(base, method, path, body)
		if !busy(status, err) || !question || time.Now().After(deadline) {
			return status, reply, err
		}
	}
}

// busy reports whether a busy or paused machine may be the reason of a failure: a timeout, a status of an unavailable
// node, or a closed connection. An indexer closes a connection at the time limit of a request's header.
func busy(status int, err error) bool {
	var network net.Error
	return status == http.StatusServiceUnavailable || status == http.StatusGatewayTimeout ||
		errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.As(err, &network) && network.Timeout()
}

func callOnce(base, method, path, body string) (status int, reply string, err error) {
	req, err := http.NewRequest(method, "http://"+base+path, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("Content-Type", "application/json")
	r, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	return r.StatusCode, string(text), err
}

// JSONList is a JSON array of a prompt's tokens.
func JSONList(list []uint32) string { return strings.ReplaceAll(fmt.Sprint(list), " ", ",") }

// HTTPTimeout is how long an HTTP port has for an answer.
const HTTPTimeout = 5 * time.Second

// statusError is a reply with an error status.
type statusError struct {
	status int
	body   string
}

func (e *statusError) Error() string { return fmt.Sprintf("%d %s", e.status, e.body) }

// HTTPDo sends a request to an indexer's HTTP port, and decodes the answer if into is not nil. HTTPDo repeats the
// request while the machine is [busy].
func HTTPDo(addr, method, path string, body, into any) error {
	for deadline := time.Now().Add(Patience); ; time.Sleep(20 * time.Millisecond) {
		err := HTTPOnce(addr, method, path, body, into)
		status := 0
		var refused *statusError
		if errors.As(err, &refused) {
			status = refused.status
		}
		if !busy(status, err) || time.Now().After(deadline) {
			return err
		}
	}
}

// HTTPOnce is HTTPDo without retries.
func HTTPOnce(addr, method, path string, body, into any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	if method == http.MethodGet && body == nil {
		text = nil
	}
	r, err := http.NewRequest(method, "http://"+addr+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	answer, err := (&http.Client{Timeout: HTTPTimeout}).Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(answer.Body)
	if err != nil {
		return err
	}
	if answer.StatusCode != 200 {
		return &statusError{answer.StatusCode, string(b)}
	}
	if text, ok := into.(*string); ok {
		*text = string(b)
		return nil
	}
	return json.Unmarshal(b, into)
}

// LocalsQuery returns a query for the prompt with the given local hashes.
func LocalsQuery(locals []events.LocalHash) api.Query {
	q := api.Query{Model: "m"}
	for _, l := range locals {
		q.Hashes = append(q.Hashes, uint64(l))
	}
	return q
}

// FindLocals sends a LocalsQuery.
func FindLocals(addr string, locals []events.LocalHash) (a api.Answer, err error) {
	err = HTTPDo(addr, "POST", "/v1/find", LocalsQuery(locals), &a)
	return a, err
}

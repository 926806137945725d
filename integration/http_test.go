package integration

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// httpTimeout is how long an HTTP port has for an answer.
const httpTimeout = 5 * time.Second

// statusError is an answer that is none.
type statusError struct {
	status int
	body   string
}

func (e *statusError) Error() string { return fmt.Sprintf("%d %s", e.status, e.body) }

// httpDo asks an indexer's HTTP port, and decodes the answer if into is not nil. It asks again if no answer comes in time, or the node says that it cannot give
// one now: the machine may have stood still.
func httpDo(addr, method, path string, body, into any) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		err := httpOnce(addr, method, path, body, into)
		var refused *statusError
		var network net.Error
		late := errors.As(err, &network) && network.Timeout() ||
			errors.As(err, &refused) && (refused.status == http.StatusServiceUnavailable || refused.status == http.StatusGatewayTimeout)
		if !late || time.Now().After(deadline) {
			return err
		}
	}
}

// httpOnce is httpDo that asks once.
func httpOnce(addr, method, path string, body, into any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	r, err := http.NewRequest(method, "http://"+addr+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	answer, err := (&http.Client{Timeout: httpTimeout}).Do(r)
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

// localsQuery asks who holds how much of the prompt with these local hashes.
func localsQuery(locals []events.LocalHash) api.Query {
	q := api.Query{Model: "m"}
	for _, l := range locals {
		q.Hashes = append(q.Hashes, uint64(l))
	}
	return q
}

// findLocals asks it.
func findLocals(addr string, locals []events.LocalHash) (a api.Answer, err error) {
	err = httpDo(addr, "POST", "/v1/find", localsQuery(locals), &a)
	return a, err
}

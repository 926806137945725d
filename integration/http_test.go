package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// httpTimeout is how long an HTTP port has for an answer.
const httpTimeout = 5 * time.Second

// httpDo asks an indexer's HTTP port, and decodes the answer if into is not nil.
func httpDo(addr, method, path string, body, into any) error {
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
		return fmt.Errorf("%d %s", answer.StatusCode, b)
	}
	if text, ok := into.(*string); ok {
		*text = string(b)
		return nil
	}
	return json.Unmarshal(b, into)
}

// findLocals asks who holds how much of the prompt with these local hashes.
func findLocals(addr string, locals []events.LocalHash) (a api.Answer, err error) {
	q := api.Query{Model: "m"}
	for _, l := range locals {
		q.Hashes = append(q.Hashes, uint64(l))
	}
	err = httpDo(addr, "POST", "/v1/find", q, &a)
	return a, err
}

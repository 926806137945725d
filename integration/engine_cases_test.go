package integration

import (
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// engineCase is a file of testdata/cases/engine-http. testdata/cases/README.md describes the fields.
type engineCase struct {
	Report string           `json:"report"`
	Why    string           `json:"why"`
	Routes map[string]any   `json:"routes"`
	Then   map[string]any   `json:"then"`
	Flags  []string         `json:"flags"`
	Events [][]any          `json:"events"`
	Ask    []map[string]any `json:"ask"`
	Record map[string]any   `json:"record"`
	Chosen *bool            `json:"chosen"`
	WaitS  float64          `json:"wait_s"` // of another player; this one waits for the answers
}

// TestEngineHTTPCases plays every file of testdata/cases/engine-http with an HTTP API of an engine, real sockets,
// worker-shim with --engine-http, and an indexer, which must return the results of the case.
func TestEngineHTTPCases(t *testing.T) {
	t.Parallel()
	playCases(t, "engine-http", func(t *testing.T, x *harness.Indexer, name string, c *engineCase) {
		if c.Report == "" || c.Why == "" || c.Routes == nil || len(c.Events) == 0 || len(c.Ask) == 0 {
			t.Fatal("the case lacks a report, why, routes, events or ask")
		}
		c.play(t, x, name)
	})
}

func (c *engineCase) play(t *testing.T, x *harness.Indexer, name string) {
	engine, front := startCaseEngine(t), startEngineAPI(t)
	port := func(endpoint string) string { return endpoint[strings.LastIndexByte(endpoint, ':')+1:] }
	ports := strings.NewReplacer("{EVENTS}", port(engine.endpoint), "{REPLAY}", port(engine.replay))
	answers := map[string]string{}
	serve := func(routes map[string]any) {
		t.Helper()
		for path, answer := range routes {
			text, is := answer.(string)
			if !is {
				data, err := json.Marshal(answer)
				if err != nil {
					t.Fatal(err)
				}
				text = string(data)
			}
			answers[path] = ports.Replace(text)
		}
		front.says(answers)
	}
	serve(c.Routes)
	args := []string{"run", "--engine-http", front.URL, "--worker", name, "--nats", x.NATS}
	for _, flag := range c.Flags {
		args = append(args, ports.Replace(flag))
	}
	harness.Start(t, "worker-shim", args...)
	if err := engine.WaitSubscribers(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	for _, events := range c.Events {
		engine.publish(t, expanded(events).([]any))
	}
	if c.Then != nil {
		harness.Eventually(t, "the indexer has applied events", func() (bool, string) {
			w := c.worker(t, x, name)
			return w.Stored > 0, fmt.Sprintf("%+v", w)
		})
		serve(c.Then)
	}
	for _, ask := range c.Ask {
		query := expanded(ask).(map[string]any)
		want, err := json.Marshal(ask["want"])
		if err != nil {
			t.Fatal(err)
		}
		delete(query, "want")
		query["workers"] = []string{name}
		harness.Eventually(t, fmt.Sprintf("find for %v returns %s", query["model"], want), func() (bool, string) {
			_, text := caseRequest(t, x, "/v1/find", query)
			var a api.Answer
			err := json.Unmarshal([]byte(text), &a)
			got := [][4]uint32{}
			for _, o := range a.Workers {
				got = append(got, [4]uint32{o.Device, o.Host, o.Disk, o.External})
			}
			list, _ := json.Marshal(got)
			return err == nil && a.Complete && string(list) == string(want), text
		})
	}
	for field, want := range c.Record {
		harness.Eventually(t, fmt.Sprintf("the record's %s is %v", field, want), func() (bool, string) {
			var record map[string]any
			data, err := json.Marshal(c.worker(t, x, name).Record)
			if err == nil {
				err = json.Unmarshal(data, &record)
			}
			return err == nil && reflect.DeepEqual(record[field], want), string(data)
		})
	}
	if c.Chosen == nil {
		return
	}
	query := map[string]any{"model": c.Ask[0]["model"], "tokens": expanded(c.Ask[0]["tokens"]), "workers": []string{name}}
	harness.Eventually(t, fmt.Sprintf("select names the worker: %t", *c.Chosen), func() (bool, string) {
		status, text := caseRequest(t, x, "/v1/select", query)
		var s struct{ Worker string }
		err := json.Unmarshal([]byte(text), &s)
		chosen := status == http.StatusOK && s.Worker == name
		return err == nil && chosen == *c.Chosen && (chosen || strings.Contains(text, string(api.CodeNoWorkers))), text
	})
}

// worker returns rank 0 of the case's worker in the indexer's list.
func (c *engineCase) worker(t *testing.T, x *harness.Indexer, name string) (w api.WorkerInfo) {
	t.Helper()
	var list api.WorkerList
	if err := harness.HTTPDo(x.HTTP, http.MethodGet, "/v1/workers", nil, &list); err != nil {
		t.Fatal(err)
	}
	at := slices.IndexFunc(list.Workers, func(w api.WorkerInfo) bool { return string(w.Instance) == name && w.Rank == 0 })
	if at >= 0 {
		w = list.Workers[at]
	}
	return w
}

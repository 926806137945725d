package events

import (
	"reflect"
	"strings"
	"testing"
)

var workerLines = []struct {
	text     string
	ids      []uint64
	shutdown bool
}{
	{`{"event_id":1,"data":{"stored":{"parent_hash":null,"blocks":[{"block_hash":1,"tokens_hash":2}]}}}`, []uint64{1}, false},
	{`{"event_id":2,"data":"cleared","dp_rank":3}`, []uint64{2}, false},
	{`{"events":[{"event_id":3,"data":{"removed":{"block_hashes":[1,-2]}}},{"event_id":4,"data":"cleared"}],
		"shutdown":false}`, []uint64{3, 4}, false},
	{`{"events":[],"shutdown":true}`, nil, true},
	{`{"events":[{"event_id":5,"data":"cleared"}],"shutdown":true}`, []uint64{5}, true},
	{`{"worker_id":9,"storage_tier":"disk","event":{"event_id":6,"data":{"removed":{"block_hashes":[1]}}}}`,
		[]uint64{6}, false},
}

// TestWorkerEvents reads a worker's events without the worker's name; the results equal those with the name.
func TestWorkerEvents(t *testing.T) {
	for _, c := range workerLines {
		var ids []uint64
		shutdown, err := ReadWorkerEvents([]byte(c.text), "w", func(e RouterEvent, text []byte) error {
			ids = append(ids, e.ID)
			if e.Key.Instance != "w" {
				t.Errorf("%s is of %q", c.text, e.Key.Instance)
			}
			if !strings.Contains(string(text), "event") {
				return nil
			}
			bare := string(text)
			if !strings.Contains(bare, "worker_id") {
				bare = `{"worker_id":"w","event":` + bare + "}"
			}
			want, err := ReadRouterEvent([]byte(bare))
			want.Key.Instance = "w"
			if err != nil || !reflect.DeepEqual(e, want) {
				t.Errorf("%s: %+v, want %+v, %v", text, e, want, err)
			}
			return nil
		})
		if err != nil || shutdown != c.shutdown || !reflect.DeepEqual(ids, c.ids) {
			t.Errorf("%s: %v %v %v", c.text, ids, shutdown, err)
		}
	}
	for _, text := range []string{``, `[]`, `{}`, `{"shutdown":true}`, `{"event_id":1}`, `{"events":[{}]}`,
		`{"events":{}}`, `{"events":[],"event_id":1}`, `{"events":[7]}`, `{"event_id":-1,"data":"cleared"}`,
		`{"event_id":1,"data":"cleared"} {}`, `{"event_id":1,"data":"cleared","event":{}}`} {
		if _, err := ReadWorkerEvents([]byte(text), "w", func(RouterEvent, []byte) error { return nil }); err == nil {
			t.Errorf("%s can be read", text)
		}
	}
}

func FuzzWorkerEvents(f *testing.F) {
	for _, c := range workerLines {
		f.Add([]byte(c.text))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		_, _ = ReadWorkerEvents(line, "w", func(e RouterEvent, _ []byte) error {
			checkRouterEvent(t, e)
			if e.Key.Instance != "w" {
				t.Fatalf("%+v", e)
			}
			return nil
		})
	})
}

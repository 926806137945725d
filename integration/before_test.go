package integration

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// withdrawn are the fields of earlier versions that are not read any more.
var withdrawn = map[string]bool{"worker-record.engine.snapshot_endpoint": true}

// TestMessagesOfEarlierVersions reads messages of nodes, shims and clients of earlier versions, and loses no field
// except the withdrawn ones.
func TestMessagesOfEarlierVersions(t *testing.T) {
	files, err := filepath.Glob("testdata/v*/*.*")
	if err != nil || len(files) < 21 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		text := strings.TrimSuffix(file, filepath.Ext(file))
		into, known := map[string]any{
			"query": &api.Query{}, "answer": &api.Answer{}, "error": &api.ErrorBody{}, "status": &api.Status{},
			"workers-request": &api.WorkersRequest{}, "worker-list": &api.WorkerList{},
			"snapshot-list":  &api.SnapshotList{},
			"status-request": &api.StatusRequest{}, "verify-request": &api.VerifyRequest{}, "model": &jetstream.Model{},
			"node-record": &cluster.Record{}, "worker-record": &registry.Record{}, "shim": &control.Shim{},
		}[filepath.Base(text)]
		if !known {
			t.Errorf("%s: no type for it", file)
			continue
		}
		data, err := os.ReadFile(file)
		if err == nil && filepath.Ext(file) == ".msgpack" {
			err = api.Unmarshal(api.MsgPack, data, into)
		} else if err == nil {
			err = json.Unmarshal(data, into)
		}
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		var want, got any
		if data, err = os.ReadFile(text + ".json"); err == nil {
			err = json.Unmarshal(data, &want)
		}
		if err == nil {
			data, err = json.Marshal(into)
		}
		if err == nil {
			err = json.Unmarshal(data, &got)
		}
		if err == nil {
			err = lost(filepath.Base(text), want, got)
		}
		if err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// lost returns the differences of a JSON value from another value, which may have more fields.
func lost(at string, want, got any) error {
	switch want := want.(type) {
	case map[string]any:
		fields, _ := got.(map[string]any)
		for name, v := range want {
			if at := at + "." + name; !withdrawn[at] {
				if err := lost(at, v, fields[name]); err != nil {
					return err
				}
			}
		}
		return nil
	case []any:
		list, _ := got.([]any)
		if len(list) != len(want) {
			return fmt.Errorf("%s is %v, was %v", at, got, want)
		}
		for i, v := range want {
			if err := lost(fmt.Sprintf("%s[%d]", at, i), v, list[i]); err != nil {
				return err
			}
		}
		return nil
	}
	if !reflect.DeepEqual(got, want) {
		return fmt.Errorf("%s is %v, was %v", at, got, want)
	}
	return nil
}

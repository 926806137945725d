package dynamo

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/ingest/kube"
	"github.com/kvatlas/kvatlas/tools/kubesim"
)

// metadata is a DynamoWorkerMetadata with the fields of ai-dynamo/dynamo › lib/runtime/src/discovery/kube/fixtures/
// v1_2_dwm.json, a channel over ZeroMQ and its source.
const metadata = `{"apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoWorkerMetadata", "metadata": {"name": "worker-0"},
"spec": {"data": {
  "endpoints": {"dynamo/backend/generate/2a": {"type": "Endpoint", "namespace": "dynamo", "instance_id": 42}},
  "model_cards": {"dynamo/backend/generate/2a": {"type": "Model", "namespace": "dynamo", "instance_id": 7,
    "card_json": {"worker_type": "decode", "runtime_config": {"total_kv_blocks": 9}}}},
  "event_channels": {
    "dynamo/backend/kv-events/2a": {"type": "EventChannel", "namespace": "dynamo", "component": "backend",
      "topic": "kv-events", "instance_id": 42, "transport": {"kind": "Zmq", "config": {"endpoint": "tcp://10.0.0.1:5557"}}},
    "dynamo//kv_metrics/2a": {"type": "EventChannel", "namespace": "dynamo", "component": "", "topic": "kv_metrics",
      "instance_id": 42, "transport": {"kind": "Nats", "config": {"subject_prefix": "namespace.dynamo"}}}},
  "event_sources": {"42": {"publisher_id": 42, "metadata": {"worker": {"worker_id": 7, "dp_rank": 1}}}}}}}`

// TestKubernetes: the publishers of an object are listed with scope and rank, and disappear with the object.
func TestKubernetes(t *testing.T) {
	s := kubesim.Start()
	defer s.Close()
	const path = "/apis/nvidia.com/v1alpha1/namespaces/default/dynamoworkermetadatas"
	var object kubesim.Object
	if err := json.Unmarshal([]byte(metadata), &object); err != nil {
		t.Fatal(err)
	}
	s.Put(path, object)
	client, err := kube.New(kube.Config{URL: s.URL})
	if err != nil {
		t.Fatal(err)
	}
	k := NewKubernetes(client, "default", func(err error) { t.Error(err) })
	if _, _, err := k.Publishers(); err != kube.ErrNotListed {
		t.Errorf("before the first answer: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		k.Run(ctx)
	}()
	defer func() { cancel(); <-ended }()
	await := func(n int) (list []Publisher) {
		t.Helper()
		for {
			list, wrong, err := k.Publishers()
			if len(wrong) > 0 {
				t.Fatal(wrong)
			}
			if err == nil && len(list) == n {
				return list
			}
			if !loop.Wait(ctx, time.Millisecond) {
				t.Fatalf("%d publishers are not listed: %v, %v", n, list, err)
			}
		}
	}
	p := await(1)[0]
	if p.ID != 42 || p.Scope != "dynamo.backend" || p.Endpoint != "tcp://10.0.0.1:5557" || !p.Known ||
		p.Key.Instance != "7" || p.Key.Rank != 1 {
		t.Errorf("the publisher is %+v", p)
	}
	s.Delete(path, "worker-0")
	await(0)
}

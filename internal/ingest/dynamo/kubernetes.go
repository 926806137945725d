package dynamo

import (
	"context"
	"encoding/json"
	"net/url"

	"github.com/kvatlas/kvatlas/internal/ingest/kube"
)

// Kubernetes keeps a copy of the workers' registrations in Kubernetes (DYN_DISCOVERY_BACKEND=kubernetes): a
// DynamoWorkerMetadata for each container (ai-dynamo/dynamo › lib/runtime/src/discovery/kube/crd.rs). A pod owns its
// objects. Kubernetes deletes the objects with their pod.
type Kubernetes struct{ objects *kube.Copy[workerMetadata] }

// workerMetadata contains the decoded fields of a DynamoWorkerMetadata. Its records equal those of other backends.
type workerMetadata struct {
	Meta kube.Meta `json:"metadata"`
	Spec struct {
		Data struct {
			Channels map[string]json.RawMessage `json:"event_channels"`
			Sources  map[string]json.RawMessage `json:"event_sources"`
			Cards    map[string]json.RawMessage `json:"model_cards"`
		} `json:"data"`
	} `json:"spec"`
}

// Metadata returns the object's metadata.
func (m workerMetadata) Metadata() *kube.Meta { return &m.Meta }

// NewKubernetes returns a copy that is empty until [Kubernetes.Run] runs. failed is called after each failure of the
// API server.
func NewKubernetes(client *kube.Client, namespace string, failed func(error)) *Kubernetes {
	path := "/apis/nvidia.com/v1alpha1/namespaces/" + url.PathEscape(namespace) + "/dynamoworkermetadatas"
	return &Kubernetes{kube.NewCopy[workerMetadata](client, kube.Collection{Path: path}, failed)}
}

// Run updates the copy until ctx ends.
func (k *Kubernetes) Run(ctx context.Context) { k.objects.Run(ctx) }

// Publishers returns the registered publishers of KV-cache events. wrong contains the errors of skipped records. The
// error is [kube.ErrNotListed] or nil.
func (k *Kubernetes) Publishers() (list []Publisher, wrong []error, err error) {
	objects, err := k.objects.List()
	if err != nil {
		return nil, nil, err
	}
	var channels, sources, cards []record
	for i := range objects {
		name := objects[i].Meta.Namespace + "/" + objects[i].Meta.Name
		for key, text := range objects[i].Spec.Data.Channels {
			channels = append(channels, record{name + " " + key, text})
		}
		for key, text := range objects[i].Spec.Data.Sources {
			sources = append(sources, record{name + " " + key, text})
		}
		for key, text := range objects[i].Spec.Data.Cards {
			cards = append(cards, record{name + " " + key, text})
		}
	}
	list, wrong = publishers(channels, sources, cards)
	return list, wrong, nil
}

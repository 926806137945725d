package dynamo

import (
	"context"
	"crypto/tls"
	"strings"

	"github.com/kvatlas/kvatlas/internal/ingest/etcd"
)

// EtcdConfig says where etcd is. Only URLs are required.
type EtcdConfig struct {
	URLs     []string // http://HOST:PORT or https://HOST:PORT; another one is asked when one fails
	User     string   // if etcd has authentication on
	Password string
	TLS      *tls.Config
}

// Etcd keeps a copy of what Dynamo's workers have registered in etcd, as DYN_DISCOVERY_BACKEND=etcd has them do. Its
// keys are under leases of their processes: what is gone is deleted.
type Etcd struct{ records *etcd.Copy }

// NewEtcd returns a copy that is empty until [Etcd.Run] runs. Its errors are those of [etcd.New].
func NewEtcd(cfg EtcdConfig) (*Etcd, error) {
	records, err := etcd.New(etcd.Config{URLs: cfg.URLs, User: cfg.User, Password: cfg.Password, TLS: cfg.TLS,
		From: "v1/event_", Behind: "v1/event`"}) // event_channels and event_sources
	if err != nil {
		return nil, err
	}
	return &Etcd{records}, nil
}

// Run keeps the copy until ctx ends.
func (e *Etcd) Run(ctx context.Context) { e.records.Run(ctx) }

// Publishers lists the publishers of KV-cache events that are registered, by id. wrong is what is in records that are
// passed over. An error says that etcd cannot be asked now, and why; who is registered is not known then.
func (e *Etcd) Publishers() (list []Publisher, wrong []error, err error) {
	records, err := e.records.Records()
	if err != nil {
		return nil, nil, err
	}
	var channels, sources []record
	for key, text := range records {
		switch r := (record{key, text}); {
		case strings.HasPrefix(key, "v1/"+channelsKind+"/"):
			channels = append(channels, r)
		case strings.HasPrefix(key, "v1/"+sourcesKind+"/"):
			sources = append(sources, r)
		}
	}
	list, wrong = publishers(channels, sources)
	return list, wrong, nil
}

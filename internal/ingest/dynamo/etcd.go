package dynamo

import (
	"context"
	"crypto/tls"
	"strings"

	"github.com/kvatlas/kvatlas/internal/ingest/etcd"
)

// EtcdConfig configures the connection to etcd. Only URLs is required.
type EtcdConfig struct {
	URLs     []string // http://HOST:PORT or https://HOST:PORT; after a failure the next URL is used
	User     string   // if etcd requires authentication
	Password string
	TLS      *tls.Config
}

// Etcd keeps a copy of the workers' registrations in etcd (DYN_DISCOVERY_BACKEND=etcd). The keys are under leases of
// their processes, so etcd deletes the keys of ended processes.
type Etcd struct{ records *etcd.Copy }

// keys is the prefix of Dynamo's keys in etcd.
const keys = "v1/"

// NewEtcd returns a copy that is empty until [Etcd.Run] runs. It returns the errors of [etcd.New].
func NewEtcd(cfg EtcdConfig) (*Etcd, error) {
	records, err := etcd.New(etcd.Config{URLs: cfg.URLs, User: cfg.User, Password: cfg.Password, TLS: cfg.TLS,
		From: keys + "event_", Behind: keys + cardsKind + "0"}) // the digit follows the slash
	if err != nil {
		return nil, err
	}
	return &Etcd{records}, nil
}

// Run updates the copy until ctx ends.
func (e *Etcd) Run(ctx context.Context) { e.records.Run(ctx) }

// Publishers returns the registered publishers of KV-cache events, by id. wrong contains the errors of skipped records.
// err is the reason if etcd is unreachable now; then the registrations are unknown.
func (e *Etcd) Publishers() (list []Publisher, wrong []error, err error) {
	records, err := e.records.Records()
	if err != nil {
		return nil, nil, err
	}
	var channels, sources, cards []record
	for key, text := range records {
		switch r := (record{key, text}); {
		case strings.HasPrefix(key, keys+channelsKind+"/"):
			channels = append(channels, r)
		case strings.HasPrefix(key, keys+sourcesKind+"/"):
			sources = append(sources, r)
		case strings.HasPrefix(key, keys+cardsKind+"/"):
			cards = append(cards, r)
		}
	}
	list, wrong = publishers(channels, sources, cards)
	return list, wrong, nil
}

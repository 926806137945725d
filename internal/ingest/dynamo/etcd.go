package dynamo

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"sync"

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
type Etcd struct{ events, cards *etcd.Copy }

// keys is the prefix of Dynamo's keys in etcd.
const keys = "v1/"

// NewEtcd returns a copy that is empty until [Etcd.Run] runs. It returns the errors of [etcd.New].
func NewEtcd(cfg EtcdConfig) (*Etcd, error) {
	of := etcd.Config{URLs: cfg.URLs, User: cfg.User, Password: cfg.Password, TLS: cfg.TLS,
		From: keys + "event_", Behind: keys + "event`"} // all with this prefix: the backquote follows the underscore
	events, err := etcd.New(of)
	if err != nil {
		return nil, err
	}
	of.From, of.Behind = keys+cardsKind+"/", keys+cardsKind+"0" // the digit follows the slash
	cards, err := etcd.New(of)
	return &Etcd{events, cards}, err
}

// Run updates the copy until ctx ends.
func (e *Etcd) Run(ctx context.Context) {
	var both sync.WaitGroup
	both.Go(func() { e.events.Run(ctx) })
	both.Go(func() { e.cards.Run(ctx) })
	both.Wait()
}

// Publishers returns the registered publishers of KV-cache events, by id. wrong contains the errors of skipped records.
// err is the reason if etcd is unreachable now; then the registrations are unknown. A user without access to the cards
// gets publishers without cards.
func (e *Etcd) Publishers() (list []Publisher, wrong []error, err error) {
	records, err := e.events.Records()
	if err != nil {
		return nil, nil, err
	}
	var channels, sources, cards []record
	models, err := e.cards.Records()
	switch {
	case errors.Is(err, etcd.ErrNotAsked):
		return nil, nil, err
	case err != nil:
		wrong = append(wrong, fmt.Errorf("the roles of workers are unknown; permit --etcd-user to read the keys with the "+
			"prefix %s: %w", keys+cardsKind+"/", err))
	}
	for key, text := range models {
		cards = append(cards, record{key, text})
	}
	for key, text := range records {
		switch r := (record{key, text}); {
		case strings.HasPrefix(key, keys+channelsKind+"/"):
			channels = append(channels, r)
		case strings.HasPrefix(key, keys+sourcesKind+"/"):
			sources = append(sources, r)
		}
	}
	list, bad := publishers(channels, sources, cards)
	return list, append(wrong, bad...), nil
}

package server

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/regions"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Regions configures the exchange of digests with other regions.
type Regions struct {
	Name        string        // of this node's region; empty disables the exchange
	Prices      []string      // REGION=MS, of requests in other regions
	DigestBytes int           // of this node's filters, at most
	Interval    time.Duration // between digests
	MaxAge      time.Duration // after which a digest counts as unknown
}

// regional is the exchange of digests of a node with a region.
type regional struct {
	Regions
	began time.Time // of the machine's times

	view atomic.Pointer[regions.View]

	mu        sync.Mutex
	machine   *regions.Machine
	published api.RegionsStatus // of the own digests; without figures of other regions
	leaks     uint64            // messages of other regions on the subject of the own region
	leaking   sighting          // region with such messages
	twin      sighting          // node outside of the cluster that publishes digests with the name of the own region
}

// newRegional returns the exchange of digests, or nil without a region.
func (s *Server) newRegional() (*regional, error) {
	if s.Regions.Name == "" {
		return nil, nil
	}
	prices, err := regions.ParsePrices(s.Regions.Prices)
	if err != nil {
		return nil, fmt.Errorf("price of a region: %w", err)
	}
	r := &regional{Regions: s.Regions, began: time.Now(),
		machine: regions.New(regions.Config{Region: s.Regions.Name, Prices: prices, MaxAge: s.Regions.MaxAge})}
	r.view.Store(r.machine.View())
	return r, nil
}

func (r *regional) now() time.Duration { return time.Since(r.began) }

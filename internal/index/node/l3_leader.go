package node

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/ingest/etcd"
	"github.com/kvatlas/kvatlas/internal/ingest/sharedstore"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// elected is the leader of several Mooncake masters, as published in etcd. A new leader is a new store: the node closes
// the connections to the old store and drops the cache of old answers. Requests go to a single leader at a time.
// elected implements [hicache.Store]; any goroutine may call the methods, except Watch, which runs once.
type elected struct {
	election hicache.Election
	cfg      sharedstore.MooncakeConfig // of all leaders, without the address
	copy     *etcd.Copy
	woken    chan struct{} // holds a signal after a change of the copy

	mu       sync.RWMutex
	leader   *sharedstore.Mooncake // nil: unknown
	address  string                // of leader
	err      error                 // the reason for the absence of a leader
	changes  uint64
	failures uint64
	unseen   uint64 // of earlier leaders
}

// leaderBytes limits etcd's response: one key with an address.
const leaderBytes = 64 << 10

var errNoLeader = errors.New("etcd has no leader of the masters")

func newElected(election hicache.Election, cfg sharedstore.MooncakeConfig) (*elected, error) {
	e := &elected{election: election, cfg: cfg, woken: make(chan struct{}, 1), err: etcd.ErrNotAsked}
	var err error
	e.copy, err = etcd.New(etcd.Config{URLs: election.Endpoints, From: election.Key, Behind: election.Key + "\x00",
		Records: 1, Bytes: leaderBytes, Dial: cfg.Dial, Changed: func() { loop.Wake(e.woken) }})
	return e, err
}

// Watch follows the election and watches the leader until ctx ends.
func (e *elected) Watch(ctx context.Context) {
	var following sync.WaitGroup
	following.Go(func() { e.copy.Run(ctx) })
	stop := func() {}
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-e.woken:
			if e.elect(e.copy.Records()) {
				stop()
				stop = e.watchLeader(ctx)
			}
		}
	}
	stop()
	following.Wait()
}

// elect applies the records of etcd, or etcd's error. changed reports whether the leader is new or absent now. While
// etcd fails, the last leader stays: a master that has lost the election does not serve.
func (e *elected) elect(records map[string][]byte, err error) (changed bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	address := e.address
	if err == nil {
		address = ""
		if value, there := records[e.election.Key]; there {
			address, err = e.election.Leader(string(value))
		} else {
			err = errNoLeader
		}
	}
	if e.err = err; err != nil {
		e.failures++
	}
	if address == e.address {
		return false
	}
	if e.leader != nil {
		e.unseen += e.leader.Unseen()
	}
	if e.leader, e.address = nil, address; address != "" {
		cfg := e.cfg
		cfg.Address = address
		if e.leader, e.err = sharedstore.NewMooncake(cfg); e.err == nil {
			e.changes++
		}
	}
	return true
}

// watchLeader watches the present leader until stop is called. It invalidates the answers of earlier leaders.
func (e *elected) watchLeader(ctx context.Context) (stop func()) {
	if e.cfg.Changed != nil {
		e.cfg.Changed("another master leads")
	}
	leader, _ := e.now()
	if leader == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		leader.Watch(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

// now returns the leader, or the reason for the absence of a leader.
func (e *elected) now() (*sharedstore.Mooncake, error) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	if e.leader == nil {
		return nil, fmt.Errorf("mooncake: %w: %w", sharedstore.ErrStandby, e.err)
	}
	return e.leader, nil
}

// Exists queries the leader.
func (e *elected) Exists(ctx context.Context, keys []string) (present, known hicache.Bitmap, err error) {
	leader, err := e.now()
	if err != nil {
		return hicache.NewBitmap(len(keys)), hicache.NewBitmap(len(keys)), err
	}
	return leader.Exists(ctx, keys)
}

// Down returns the reason why no master is usable, or "".
func (e *elected) Down() string {
	leader, err := e.now()
	if err != nil {
		return err.Error()
	}
	return leader.Down()
}

// Unseen counts the keys in the replies of all leaders that were in no request.
func (e *elected) Unseen() uint64 {
	e.mu.RLock()
	defer e.mu.RUnlock()
	n := e.unseen
	if e.leader != nil {
		n += e.leader.Unseen()
	}
	return n
}

// status returns the state of the election.
func (e *elected) status() *api.StoreElection {
	e.mu.RLock()
	defer e.mu.RUnlock()
	s := &api.StoreElection{Leader: e.address, Changes: e.changes, Failures: e.failures}
	if e.err != nil {
		s.Error = e.err.Error()
	}
	return s
}

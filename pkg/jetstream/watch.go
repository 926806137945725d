package jetstream

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// Watched is what [Bucket.Watch] tells.
type Watched struct {
	// Anew says that all keys that there are follow, and that those told before which do not come again are gone. So it
	// is at the beginning, and after each break.
	Anew bool

	// Epoch, with Anew, is when the bucket was created. Another than before says that it was deleted and made anew.
	Epoch time.Time

	Entries []Entry // of each key the latest

	// Current says, once after each Anew, that all keys have been told that were there when it began.
	Current bool

	// Err, if not nil, is all: the bucket cannot be watched for now. Anew follows when it can again.
	Err error
}

// Waits of a watch.
const (
	watchHeartbeat = time.Second     // how often the server says that there is nothing
	watchSilence   = 3 * time.Second // without a sound the consumer is taken for gone
	watchLook      = 5 * time.Second // how often the stream is compared with the one that was there
)

// Watch tells observe what is in the bucket and what changes, from one goroutine, until ctx ends. While observe is
// busy, changes of the same key become one: what waits is bounded by the number of keys.
//
// nats.go's watcher is not used: after a bucket was deleted and made again it waits for ever.
func (b *Bucket) Watch(ctx context.Context, observe func(Watched)) {
	down := false
	for pause := time.Duration(0); loop.Wait(ctx, pause); pause = min(2*pause+50*time.Millisecond, time.Second) {
		began := time.Now()
		err := b.watchOnce(ctx, observe, func() { down = false })
		if ctx.Err() != nil {
			return
		}
		if !errors.Is(err, errLookAgain) && !down {
			down = true
			observe(Watched{Err: failed("watch bucket "+b.name, err)})
		}
		if time.Since(began) > watchSilence {
			pause = 0
		}
	}
}

type watchSession struct {
	wake chan struct{}

	mu      sync.Mutex
	prefix  string
	nextDel uint64
	waiting map[string]Entry
	order   []string // keys of waiting
	left    uint64   // messages that were there when it began and are still to come
	heard   time.Time
	err     error
}

func (b *Bucket) watchOnce(ctx context.Context, observe func(Watched), begun func()) error {
	c := b.c
	lost := c.untilLost()
	before, err := c.infoOnce(ctx, b.stream)
	if err != nil {
		return err
	}
	s := &watchSession{wake: make(chan struct{}, 1), prefix: keySubject(b.name, ""), nextDel: 1,
		waiting: map[string]Entry{}, heard: time.Now()}
	s.mu.Lock() // until it is known how much is there
	inbox := c.inbox + "." + nuid.Next()
	sub, err := c.nc.Subscribe(inbox, s.receive)
	if err == nil {
		err = sub.SetPendingLimits(-1, -1) // what waits is merged
	}
	if err != nil {
		s.mu.Unlock()
		return err
	}
	defer sub.Unsubscribe()
	_, pending, forget, err := c.newConsumer(ctx, b.stream, before.epoch(), jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy, FilterSubject: keySubject(b.name, ">"),
		DeliverSubject: inbox, IdleHeartbeat: watchHeartbeat,
	})
	s.left, s.heard = pending, time.Now()
	s.mu.Unlock()
	if err != nil {
		return err
	}
	defer forget()
	begun()
	observe(Watched{Anew: true, Epoch: before.Created})
	current := false
	beat := time.NewTicker(watchHeartbeat)
	defer beat.Stop()
	for looked := time.Now(); ; {
		entries, done, err := s.drain()
		if len(entries) > 0 || done && !current {
			observe(Watched{Entries: entries, Current: done && !current})
			current = current || done
		}
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-lost:
			return errDisconnected
		case <-s.wake:
		case <-beat.C:
			if s.silent() {
				return errLookAgain
			}
			if time.Since(looked) < watchLook {
				continue
			}
			looked = time.Now()
			switch now, err := c.infoOnce(ctx, b.stream); {
			case err != nil && classOf(err) == ErrNotFound:
				return err
			case err == nil && now.epoch() != before.epoch():
				return errLookAgain
			}
		}
	}
}

// receive is called by nats.go with one message after the other.
func (s *watchSession) receive(m *nats.Msg) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.heard = time.Now()
	if s.err != nil {
		return
	}
	d, ok := parseDelivery(m.Reply)
	switch {
	case !ok && m.Header.Get("Status") == "100": // a heartbeat, which says what the last delivery was
		if last, err := strconv.ParseUint(m.Header.Get("Nats-Last-Consumer"), 10, 64); err == nil &&
			last != s.nextDel-1 {
			s.err = errLookAgain
		}
	case !ok || !strings.HasPrefix(m.Subject, s.prefix):
		s.err = fmt.Errorf("%w: %s %s", errLookAgain, m.Header.Get("Status"), m.Header.Get("Description"))
	case d.consumerSeq != s.nextDel:
		s.err = errLookAgain
	default:
		s.nextDel++
		s.left -= min(s.left, 1)
		if d.pending == 0 {
			s.left = 0
		}
		key := m.Subject[len(s.prefix):]
		if _, there := s.waiting[key]; !there {
			s.order = append(s.order, key)
		}
		s.waiting[key] = Entry{
			Key: key, Value: m.Data, Revision: uint64(d.streamSeq), Written: time.UnixMilli(int64(d.time)),
			Deleted: m.Header.Get(headerKVOperation) != "" || m.Header.Get("Nats-Marker-Reason") != "",
		}
	}
	loop.Wake(s.wake)
}

// drain takes what has come. done says that all has come that was there at the beginning.
func (s *watchSession) drain() (entries []Entry, done bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range s.order {
		entries = append(entries, s.waiting[key])
	}
	clear(s.waiting)
	s.order = s.order[:0]
	return entries, s.left == 0 && s.err == nil, s.err
}

func (s *watchSession) silent() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Since(s.heard) > watchSilence
}

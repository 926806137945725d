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

// Watched is an update of [Bucket.Watch].
type Watched struct {
	// Anew: all present keys follow, and missing keys are gone. It is set in the first update and after each break.
	Anew bool

	// Epoch, with Anew, is the creation time of the bucket. A different time means that the bucket was recreated.
	Epoch time.Time

	Entries []Entry // the latest of each key

	// Current is set once after each Anew, when all keys that existed at the time of Anew have been delivered.
	Current bool

	// Err means that the bucket cannot be watched for now. The update has nothing else. Anew follows when the watch
	// resumes.
	Err error
}

// Times of a watch.
const (
	watchHeartbeat = time.Second     // interval of the server's heartbeats
	watchSilence   = 3 * time.Second // time without a message after which the consumer counts as gone
	watchLook      = 5 * time.Second // interval of comparisons of the stream's epoch
)

// Watch calls observe with the contents of the bucket and all changes, from a single goroutine, until ctx ends. While
// observe is busy, changes of the same key are merged, so the number of keys bounds the waiting entries.
//
// nats.go's watcher is not used: after a deletion and recreation of the bucket, nats.go's watcher waits for ever.
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
	left    uint64   // messages of the begin of the watch that have not arrived yet
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
	s.mu.Lock() // until the number of messages is known
	inbox := c.inbox + "." + nuid.Next()
	sub, err := c.nc.Subscribe(inbox, s.receive)
	if err == nil {
		err = sub.SetPendingLimits(-1, -1) // waiting entries are merged
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

// receive handles one message from nats.go.
func (s *watchSession) receive(m *nats.Msg) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.heard = time.Now()
	if s.err != nil {
		return
	}
	d, ok := parseDelivery(m.Reply)
	switch {
	case !ok && m.Header.Get("Status") == "100": // a heartbeat with the number of the last delivery
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

// drain returns and empties the waiting entries. done: all entries of the begin of the watch have arrived.
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

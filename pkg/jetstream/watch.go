package jetstream

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

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

// watchLook is the period of a watch's comparisons of the stream.
const watchLook = 5 * time.Second

// Watch calls observe with the contents of the bucket and each change, from one goroutine, until ctx ends. While
// observe runs, changes of the same key become one change, so the waiting changes are bounded by the number of keys.
func (b *Bucket) Watch(ctx context.Context, observe func(Watched)) {
	down := false
	repeat(ctx, func() (last, progress bool, err error) {
		began := time.Now()
		err = b.watchOnce(ctx, func(u Watched) {
			down = false
			observe(u)
		})
		return false, time.Since(began) > consumerSilence*consumerHeartbeat, err
	}, func(err error) {
		if !down {
			down = true
			observe(Watched{Err: failed("watch bucket "+b.name, err)})
		}
	})
}

// watchSession watches a bucket with one consumer.
type watchSession struct {
	consumer
	prefix string // of the subjects

	// Guarded by mu.
	waiting map[string]Entry
	order   []string // keys of waiting
	emptied bool     // the consumer had nothing more to send
}

func (b *Bucket) watchOnce(ctx context.Context, observe func(Watched)) error {
	s := &watchSession{consumer: newConsumer(b.c, b.stream), prefix: KeySubject(b.name, ""), waiting: map[string]Entry{}}
	s.deliver, s.status = s.merge, s.heartbeat
	before, err := b.c.infoOnce(ctx, b.stream)
	if err != nil {
		return err
	}
	_, pending, forget, err := s.open(ctx, before.epoch(), jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy, FilterSubject: KeySubject(b.name, ">"),
		DeliverSubject: s.inbox, IdleHeartbeat: consumerHeartbeat,
	})
	if err != nil {
		return err
	}
	defer forget()
	observe(Watched{Anew: true, Epoch: before.Created})
	current := false
	return s.follow(ctx, watchLook, func() error {
		entries, done, err := s.drain(pending)
		if len(entries) > 0 || done && !current {
			observe(Watched{Entries: entries, Current: done && !current})
			current = current || done
		}
		return err
	}, func(l look) (time.Duration, bool) {
		if l.err == nil && l.epoch() != before.epoch() {
			s.end(errLookAgain)
		}
		return watchLook, true
	})
}

// merge keeps the latest entry of each key.
func (s *watchSession) merge(d delivery, m *nats.Msg) error {
	key, ok := strings.CutPrefix(m.Subject, s.prefix)
	if !ok {
		return ended(m)
	}
	if _, there := s.waiting[key]; !there {
		s.order = append(s.order, key)
	}
	s.waiting[key] = Entry{
		Key: key, Value: m.Data, Revision: uint64(d.streamSeq), Written: time.UnixMilli(int64(d.time)),
		Deleted: m.Header.Get(headerKVOperation) != "" || m.Header.Get("Nats-Marker-Reason") != "",
	}
	s.emptied = s.emptied || d.pending == 0
	loop.Wake(s.wake)
	return nil
}

// heartbeat processes a status. A heartbeat has the number of the last delivery.
func (s *watchSession) heartbeat(code string, m *nats.Msg) error {
	if code != "100" {
		return ended(m)
	}
	last, err := strconv.ParseUint(m.Header.Get("Nats-Last-Consumer"), 10, 64)
	if err == nil && last != s.last {
		return errDelivery
	}
	return nil
}

// drain returns the waiting entries, and whether all entries since the creation of the consumer, which then had pending
// messages, have arrived.
func (s *watchSession) drain(pending uint64) (entries []Entry, done bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range s.order {
		entries = append(entries, s.waiting[key])
	}
	clear(s.waiting)
	s.order = s.order[:0]
	return entries, s.err == nil && (s.emptied || s.last >= pending), s.err
}

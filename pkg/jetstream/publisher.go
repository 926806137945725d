package jetstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// headerRoom is the part of a message's limit that is reserved for our headers.
const headerRoom = 512

// ErrLost: the log has lost a message that was acknowledged to this publisher (the stream was recreated, restored from
// a backup, or truncated by a crash). The shim must open a new publisher and publish a clear. [Publisher.Publish]
// returns ErrLost.
var ErrLost = errors.New("the log lost acknowledged messages")

// PublisherOptions configure the handling of failed attempts in Publish.
type PublisherOptions struct {
	Retry func(err error) // called within Publish before the retry of a failed attempt; may be nil

	// Persist retries attempts that the server refused ([ErrFull], [ErrDenied] and errors without a class) until the
	// context ends. Otherwise Publish returns the refusal.
	Persist bool

	// Crowded is called within Publish. The error wraps [ErrCrowded] after each refusal of a batch because of too many
	// open batches, and is nil after the next accepted batch. Meanwhile messages go one by one. nil disables the hook.
	Crowded func(err error)
}

// Publisher appends the messages of a (worker, rank) to the log, acknowledged and in order, without messages of other
// publishers in between. The methods may be called from any goroutine. Publish calls run one at a time.
//
// The expected sequence of the last message detects a second publisher on the same subject. The slower publisher gets
// an error that wraps [ErrConflict] and is useless from then on (fenced). The first Publish wins, not the last open.
type Publisher struct {
	c       *Conn
	p       events.Partition
	subject string
	stream  string
	id      string // unique among all publishers of all times
	o       PublisherOptions
	found   Message          // last message on the subject at the open; Seq 0 if there was none
	first   events.StreamSeq // first sequence of the stream at that time

	mu            sync.Mutex
	epoch         Epoch
	last          uint64 // sequence of the last message on the subject; 0 if there is none
	flush         uint64 // number of the present or last Publish
	tries         uint64
	indeterminate bool  // the last attempt may or may not have been stored
	dead          error // fenced, or the log has lost messages
	limit         int   // largest message in bytes
	atomic        bool
	crowd         crowd
	replicas      int // of the stream
}

// worthBatch reports whether a batch stores messages faster than single messages. A stream without replicas stages a
// batch in separate files first, so all bytes are written twice. The staging costs about eight single synced messages,
// and more than the gain for large messages. A stream with replicas stages in memory, and each single message would
// cost a round of the replicas.
func (p *Publisher) worthBatch(msgs [][]byte) bool {
	if p.replicas > 1 {
		return len(msgs) > 1
	}
	bytes := 0
	for _, m := range msgs {
		bytes += len(m)
	}
	return len(msgs) >= 8 && bytes <= len(msgs)*worthBytes
}

// worthBytes is the mean size of messages above which a batch on one server is slower than single messages.
const worthBytes = 128 << 10

// OpenPublisher reads the last message on the subject of a (worker, rank) and returns a publisher that continues after
// it. [Publisher.Found] returns that message. OpenPublisher retries until the context ends.
func (n *Namespace) OpenPublisher(ctx context.Context, key events.RankKey, o PublisherOptions) (*Publisher, error) {
	p, err := n.openPublisher(ctx, key, o)
	if err != nil {
		return nil, fmt.Errorf("open publisher of %s: %w", key, err)
	}
	return p, nil
}

func (n *Namespace) openPublisher(ctx context.Context, key events.RankKey, o PublisherOptions) (*Publisher, error) {
	part, subject, err := n.subjectOf(key)
	if err != nil {
		return nil, err
	}
	info, err := n.StreamInfo(ctx, part)
	if err != nil {
		return nil, err
	}
	if !info.direct {
		return nil, fmt.Errorf(
			"%w: stream %s does not allow direct gets (allow_direct); an indexer node sets that when it starts",
			ErrMismatch, info.Name)
	}
	if o.Retry == nil {
		o.Retry = func(error) {}
	}
	if o.Crowded == nil {
		o.Crowded = func(error) {}
	}
	p := &Publisher{
		c: n.c, p: part, subject: subject, stream: info.Name, id: nuid.Next(), o: o, first: info.First,
		epoch: info.Epoch, limit: n.c.maxMessage(info.maxMsg), atomic: info.atomic && n.c.atomicBatches(),
		replicas: info.Replicas,
	}
	last, err := n.c.lastOwn(ctx, p.stream, subject)
	switch {
	case err == nil:
		p.found, p.last = last.Message, uint64(last.Seq)
	case !errors.Is(err, ErrNotFound):
		return nil, err
	}
	return p, nil
}

func (n *Namespace) subjectOf(key events.RankKey) (p events.Partition, subject string, err error) {
	if p, err = n.PartitionOf(key.Instance); err == nil {
		subject, err = n.name.Event(p, key)
	}
	return p, subject, err
}

// maxMessage returns the largest size of a message's data.
func (c *Conn) maxMessage(streamLimit int) int {
	limit := int(c.nc.MaxPayload())
	if streamLimit > 0 {
		limit = min(limit, streamLimit)
	}
	return limit - headerRoom
}

// Found returns the last message on the subject at the open: the cursor of a restarted shim. It returns false if there
// was none.
//
// The stream's leader reported that message. During a change of leaders, the report can be slightly old, and the first
// Publish then returns a conflict.
func (p *Publisher) Found() (Message, bool) { return p.found, p.found.Seq != 0 }

// LogFirst returns the first sequence of the stream at the open.
func (p *Publisher) LogFirst() events.StreamSeq { return p.first }

// Subject returns the subject of the messages.
func (p *Publisher) Subject() string { return p.subject }

// Partition returns the partition of the subject.
func (p *Publisher) Partition() events.Partition { return p.p }

// MaxMessage returns the largest size of a message in bytes. Split larger messages before Publish.
func (p *Publisher) MaxMessage() int { return p.limit }

// Publish appends messages in order and returns the sequence of the last one after all are stored. If the server has
// atomic batches, and the messages are many and small enough, up to 1000 messages are stored together, with one sync of
// the disk. Otherwise they are stored one by one.
//
// Publish resolves an indeterminate write before it sends anything again: the last message on the subject shows how
// many messages are stored. Publish retries until all are stored or the context ends. The error then wraps
// [ErrUnavailable], and any number of the messages, from the first on, may be stored now or later. Publish the same
// events again; readers skip known events.
//
// Other errors wrap one of these classes:
//   - [ErrTooLarge]: a message is above [Publisher.MaxMessage]. No message was sent.
//   - [ErrFull] or [ErrDenied]: the server refuses the messages (see [PublisherOptions]).
//   - [ErrConflict]: another publisher was faster; a [conflictError] has its id. Every further call returns the same
//     error.
//   - [ErrLost]: the log has lost acknowledged messages. Every further call returns the same error.
//
// If the context has a span of a trace, the messages carry its header.
func (p *Publisher) Publish(ctx context.Context, msgs [][]byte) (events.StreamSeq, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	action := "publish on " + p.subject
	if p.dead != nil {
		return 0, fmt.Errorf("%s: %w", action, p.dead)
	}
	for i, m := range msgs {
		if len(m) > p.limit {
			return 0, fmt.Errorf("%s: message %d of %d: %w: %d bytes, the limit is %d", action, i+1, len(msgs),
				ErrTooLarge, len(m), p.limit)
		}
	}
	p.flush++
	done := 0 // stored messages of this call
	single := false
	for retry := (loop.Backoff{Min: 10 * time.Millisecond, Max: time.Second}); done < len(msgs); {
		var err error
		if p.indeterminate {
			done, err = p.resolve(ctx, done)
		} else {
			var stored int
			if stored, err = p.send(ctx, msgs[done:], done, single); err == nil {
				done += stored
				retry.Reset()
			}
		}
		if err == nil {
			continue
		}
		p.indeterminate = true
		if p.dead != nil {
			return 0, fmt.Errorf("%s: %w", action, p.dead)
		}
		retry.Max = time.Second
		if code := codeOf(err); batchRefused(code) {
			single = true
			p.atomic = p.atomic && code != codeAtomicDisabled
			p.batchRefused(code, err)
		} else if class := classOf(err); class != ErrUnavailable && class != ErrConflict {
			err = failed(action, err)
			if !p.o.Persist || class == ErrTooLarge {
				return 0, err
			}
			retry.Max = 5 * time.Second
			p.o.Retry(err)
		} else {
			p.o.Retry(err)
		}
		if p.c.nc.IsClosed() || !retry.Wait(ctx) {
			return 0, fmt.Errorf("%s: %w: %w", action, ErrUnavailable, err)
		}
	}
	return events.StreamSeq(p.last), nil
}

// batchRefused reports whether the server refuses these messages as a batch.
func batchRefused(code int) bool {
	return code == codeAtomicDisabled || code == codeAtomicIncomplete || code == codeAtomicTooLarge ||
		code == codeAtomicTooMany
}

// batchRefused reports the cause of a refused batch, if it is known already.
func (p *Publisher) batchRefused(code int, err error) {
	switch {
	case p.crowd.note(code, time.Now()):
		p.o.Crowded(crowded(p.stream, err))
	case !p.crowd.asks:
		p.o.Retry(err)
	}
}

// send makes one attempt to store messages after p.last. It returns the number of stored messages. first is the
// position of the first message in the flush.
func (p *Publisher) send(ctx context.Context, msgs [][]byte, first int, single bool) (stored int, err error) {
	m := &nats.Msg{Subject: p.subject, Header: nats.Header{headerExpectedLast: []string{strconv.FormatUint(p.last,
		10)}}}
	if trace := rpc.Traceparent(ctx); trace != "" {
		m.Header[headerTrace] = []string{trace}
	}
	tag := p.id + "." + decimal(p.flush) + "." + strconv.Itoa(first)
	now := time.Now()
	n := min(len(msgs), maxBatch)
	if p.crowd.probes(now) {
		n = 1
	} else if single || p.crowd.waits(now) || !p.worthBatch(msgs) {
		n = 0
	}
	if !p.atomic || n == 0 {
		m.Header[headerWriter] = []string{tag}
		m.Data = msgs[0]
		seq, err := p.c.store(ctx, p.stream, m)
		if err != nil {
			return 0, err
		}
		p.last = seq
		return 1, nil
	}
	p.tries++
	seq, err := p.c.storeBatch(ctx, p.stream, p.subject, tag+"."+decimal(p.tries), n, func(i int) *nats.Msg {
		if i == 1 {
			delete(m.Header, headerExpectedLast) // only the first message of a subject in a batch may have it
		}
		m.Data = msgs[i]
		return m
	})
	if err != nil {
		return 0, err
	}
	p.last = seq
	if p.crowd.accepted() {
		p.o.Crowded(nil)
	}
	return n, nil
}

// resolve settles an indeterminate attempt by the last message on the subject. It returns the number of stored messages
// of the flush, at least done. If another publisher has written, or the log has lost messages, it sets p.dead.
func (p *Publisher) resolve(ctx context.Context, done int) (int, error) {
	last, err := p.c.lastOwnOnce(ctx, p.stream, p.subject)
	if err != nil && classOf(err) != ErrNotFound {
		return done, err
	}
	if err == nil {
		seq := uint64(last.Seq)
		id, flush, pos := last.writer()
		switch {
		case id == p.id && seq >= p.last:
			if flush == p.flush {
				done = max(done, pos+1)
			}
			p.last, p.indeterminate = seq, false
			return done, nil
		case seq == p.last:
			p.indeterminate = false
			return done, nil
		case seq > p.last:
			return done, p.explain(ctx, &conflictError{Subject: p.subject, Expected: p.last, Found: seq, Writer: id,
				Server: "last message read"})
		}
	} else if p.last == 0 {
		p.indeterminate = false
		return done, nil
	}
	return done, p.explain(ctx, nil)
}

// explain finds out why the last known message is missing, or why another publisher's message follows it.
func (p *Publisher) explain(ctx context.Context, conflict *conflictError) error {
	// A newly elected leader may not have applied all its messages, so an apparent loss is checked again.
	for range 3 {
		a, err := p.c.infoOnce(ctx, p.stream)
		if err != nil {
			return err
		}
		info := a.info(p.p)
		switch {
		case info.Epoch != p.epoch:
			p.dead = fmt.Errorf("%w: the stream was recreated", ErrLost)
			return p.dead
		case conflict != nil:
			p.dead = conflict
			return p.dead
		case uint64(info.First) > p.last:
			p.last, p.indeterminate = 0, false // trimmed, without a later message
			return nil
		}
		if !loop.Wait(ctx, 200*time.Millisecond) {
			return ctx.Err()
		}
		last, err := p.c.lastOwnOnce(ctx, p.stream, p.subject)
		if err == nil && uint64(last.Seq) >= p.last {
			return nil // found; the next resolve reads it
		}
		if err != nil && classOf(err) != ErrNotFound {
			return err
		}
	}
	p.dead = fmt.Errorf("%w: sequence %d is missing and was not trimmed", ErrLost, p.last)
	return p.dead
}

// RanksInLog returns the ranks of a worker with messages in the log, ascending. It omits ranks beyond
// [events.MaxRanks], as nodes do.
func (n *Namespace) RanksInLog(ctx context.Context, worker events.WorkerID) (ranks []events.Rank, err error) {
	part, subject, err := n.subjectOf(events.RankKey{Instance: worker})
	if err != nil {
		return nil, err
	}
	all := subject[:strings.LastIndexByte(subject, '.')] + ".*"
	subjects, err := n.c.subjects(ctx, "list the ranks of worker "+string(worker), n.name.Stream(part), all)
	for _, s := range subjects {
		if _, _, key, err := parseEventSubject(s); err == nil && key.Rank < events.MaxRanks {
			ranks = append(ranks, key.Rank)
		}
	}
	slices.Sort(ranks)
	return ranks, err
}

// TimeOf returns the time at which a partition's stream stored a message, by its leader. The error wraps [ErrNotFound]
// if the message is missing or deleted.
func (n *Namespace) TimeOf(ctx context.Context, p events.Partition, seq events.StreamSeq) (events.Millis, error) {
	stream := n.name.Stream(p)
	var m storedMessage
	err := n.c.retry(ctx, func() (err error) {
		m, err = n.c.getMessage(ctx, stream, map[string]any{"seq": seq})
		return err
	})
	return events.Millis(m.Time.UnixMilli()), failed(fmt.Sprintf("read message %d of %s", seq, stream), err)
}

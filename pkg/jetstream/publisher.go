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

	"github.com/kvatlas/kvatlas/internal/base/hooks"
	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/rpc"
)

// headerRoom is what a limit on messages leaves for our headers.
const headerRoom = 512

// ErrLost: the log no longer has a message that it acknowledged to this publisher (stream made anew, restored
// from a backup, tail lost in a crash). The shim must open a publisher again and publish a clear. Returned by
// [Publisher.Publish].
var ErrLost = errors.New("the log lost what it had acknowledged")

// PublisherOptions say what Publish does about attempts that fail.
type PublisherOptions struct {
	Retry func(err error) // called from within Publish: an attempt failed and will be made again; may be nil

	// Persist has an attempt made again that the server refused ([ErrFull], [ErrDenied] and what has no class), until
	// the context ends. Else Publish returns the refusal.
	Persist bool

	// Crowded is called from within Publish with an error that wraps [ErrCrowded] each time the server refuses a batch
	// because too many are open, and with nil when it accepts one again. Meanwhile messages go one by one. It may be
	// nil.
	Crowded func(err error)
}

// Publisher appends the messages of one (worker, rank) to the log, each acknowledged, in order, with nothing of
// anybody else in between. Its methods may be called from any goroutine; one Publish runs at a time.
//
// A second publisher on the same subject is found out by the sequence that each expects the last message to
// have: the one that comes second gets an error that wraps [ErrConflict] and is of no use from then on
// (fenced). Who opened last is not who wins: who publishes first is.
type Publisher struct {
	c       *Conn
	p       events.Partition
	subject string
	stream  string
	id      string // ours among all publishers that ever were
	o       PublisherOptions
	found   Message          // what was last on the subject when it was opened; Seq 0 if nothing was
	first   events.StreamSeq // of the stream, then

	mu            sync.Mutex
	epoch         Epoch
	last          uint64 // sequence of the last message on the subject, ours or found; 0 if there is none
	flush         uint64 // number of the Publish under way or done
	tries         uint64
	indeterminate bool  // it is not known whether the last attempt was stored
	dead          error // fenced, or the log has lost messages
	limit         int   // bytes of one message
	atomic        bool
	crowd         crowd
	replicas      int // of the stream
}

// worthBatch reports whether messages are stored faster as a batch than one by one. A stream without replicas stages a
// batch in files of their own first, so that all is written twice: that costs as much as about eight messages forced to
// the disk one by one, and more than it saves where messages are large. With replicas it stages in memory, and each
// message alone would cost a round of theirs.
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

// worthBytes is the mean size of messages above which a batch on one server is slower than they are one by one.
const worthBytes = 128 << 10

// OpenPublisher reads what is last on the subject of a (worker, rank) and returns a publisher that continues
// after it. [Publisher.Found] has what was read. It tries until the context ends.
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
	hooks.Fill(&o)
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
		subject, err = EventSubject(n.name, p, key)
	}
	return p, subject, err
}

// maxMessage is how large the data of a message may be.
func (c *Conn) maxMessage(streamLimit int) int {
	limit := int(c.nc.MaxPayload())
	if streamLimit > 0 {
		limit = min(limit, streamLimit)
	}
	return limit - headerRoom
}

// Found is the last message that was on the subject when the publisher was opened: the cursor of a shim that
// starts again. It reports false if there was none.
//
// The stream's leader said which one it is. During a change of leaders even that can be a moment old; what is then
// missing shows itself as a conflict at the first Publish.
func (p *Publisher) Found() (Message, bool) { return p.found, p.found.Seq != 0 }

// LogFirst is the first sequence that the stream had when the publisher was opened.
func (p *Publisher) LogFirst() events.StreamSeq { return p.first }

// Subject is where the publisher publishes.
func (p *Publisher) Subject() string { return p.subject }

// Partition is where the subject belongs.
func (p *Publisher) Partition() events.Partition { return p.p }

// MaxMessage is how many bytes a message may have. Split before Publish.
func (p *Publisher) MaxMessage() int { return p.limit }

// Publish appends messages in order and returns the sequence of the last one when all are stored. Where the
// server has atomic batches and the messages are many and small enough to be worth one, up to 1000 are stored
// together, with one wait for the disk. Else they go one by one.
//
// This is the one place where an indeterminate write is resolved: before anything is sent again, the last message on
// the subject shows how many of the messages are stored. So Publish tries until all are, or the context ends; then the
// error wraps [ErrUnavailable], and any number of the messages, from the first on, may be stored, or become so: publish
// the same events again, and readers drop what they have. The error wraps [ErrTooLarge] if a message is above
// [Publisher.MaxMessage] (nothing was sent then), [ErrFull] or [ErrDenied] if the server says so (see
// [PublisherOptions]), [ErrConflict] if another publisher was faster (a [ConflictError] says who), [ErrLost] if the log
// has lost what it had. After the last two every further call returns the same error.
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
	done := 0 // messages of this call that are stored
	single := false
	for pause := 10 * time.Millisecond; done < len(msgs); {
		var err error
		if p.indeterminate {
			done, err = p.resolve(ctx, done)
		} else {
			var stored int
			if stored, err = p.send(ctx, msgs[done:], done, single); err == nil {
				done += stored
				pause = 10 * time.Millisecond
			}
		}
		if err == nil {
			continue
		}
		p.indeterminate = true
		if p.dead != nil {
			return 0, fmt.Errorf("%s: %w", action, p.dead)
		}
		most := time.Second
		if code := codeOf(err); batchRefused(code) {
			single = true
			p.atomic = p.atomic && code != codeAtomicDisabled
			p.batchRefused(code, err)
		} else if class := classOf(err); class != ErrUnavailable && class != ErrConflict {
			err = failed(action, err)
			if !p.o.Persist || class == ErrTooLarge {
				return 0, err
			}
			most = 5 * time.Second
			p.o.Retry(err)
		} else {
			p.o.Retry(err)
		}
		if p.c.nc.IsClosed() || !loop.Wait(ctx, pause) {
			return 0, fmt.Errorf("%s: %w: %w", action, ErrUnavailable, err)
		}
		pause = min(2*pause, most)
	}
	return events.StreamSeq(p.last), nil
}

// batchRefused: the server would not take this batch as a batch.
func batchRefused(code int) bool {
	return code == codeAtomicDisabled || code == codeAtomicIncomplete || code == codeAtomicTooLarge ||
		code == codeAtomicTooMany
}

// batchRefused reports why the server has refused a batch, if that is known already.
func (p *Publisher) batchRefused(code int, err error) {
	switch {
	case p.crowd.note(code, time.Now()):
		p.o.Crowded(crowded(p.stream, err))
	case !p.crowd.asks:
		p.o.Retry(err)
	}
}

// send makes one attempt to store messages after p.last and returns how many were stored. first is the position
// of the first in the flush.
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
			delete(m.Header, headerExpectedLast) // only the first of a subject in a batch may expect
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

// resolve settles an indeterminate attempt: it asks what is last on the subject and finds out how many messages of the
// flush are stored, at least done. If somebody else has written, or the log has lost messages, it sets p.dead.
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
			return done, p.explain(ctx, &ConflictError{Subject: p.subject, Expected: p.last, Found: seq, Writer: id,
				Server: "last message read"})
		}
	} else if p.last == 0 {
		p.indeterminate = false
		return done, nil
	}
	return done, p.explain(ctx, nil)
}

// explain finds out why the last message that we know of is not there, or somebody else's is behind it.
func (p *Publisher) explain(ctx context.Context, conflict *ConflictError) error {
	// A leader that was just elected may not have applied all it knows: what looks lost is looked at again.
	for range 3 {
		a, err := p.c.infoOnce(ctx, p.stream)
		if err != nil {
			return err
		}
		info := a.info(p.p)
		switch {
		case info.Epoch != p.epoch:
			p.dead = fmt.Errorf("%w: the stream was made anew", ErrLost)
			return p.dead
		case conflict != nil:
			p.dead = conflict
			return p.dead
		case uint64(info.First) > p.last:
			p.last, p.indeterminate = 0, false // trimmed, and nobody has written since
			return nil
		}
		if !loop.Wait(ctx, 200*time.Millisecond) {
			return ctx.Err()
		}
		last, err := p.c.lastOwnOnce(ctx, p.stream, p.subject)
		if err == nil && uint64(last.Seq) >= p.last {
			return nil // there it is; the next look will see it
		}
		if err != nil && classOf(err) != ErrNotFound {
			return err
		}
	}
	p.dead = fmt.Errorf("%w: sequence %d is not there any more and was not trimmed", ErrLost, p.last)
	return p.dead
}

// RanksInLog lists the ranks of a worker that have messages in the log, ascending. Ranks beyond [events.MaxRanks] are
// left out, as nodes skip them.
func (n *Namespace) RanksInLog(ctx context.Context, worker events.WorkerID) (ranks []events.Rank, err error) {
	part, subject, err := n.subjectOf(events.RankKey{Instance: worker})
	if err != nil {
		return nil, err
	}
	all := subject[:strings.LastIndexByte(subject, '.')] + ".*"
	subjects, err := n.c.subjects(ctx, "list the ranks of worker "+string(worker), StreamName(n.name, part), all)
	for _, s := range subjects {
		if _, _, key, err := ParseEventSubject(s); err == nil && key.Rank < events.MaxRanks {
			ranks = append(ranks, key.Rank)
		}
	}
	slices.Sort(ranks)
	return ranks, err
}

// TimeOf is when a partition's stream took a message, as its leader has it. The error wraps [ErrNotFound] if it is not
// there, or no more.
func (n *Namespace) TimeOf(ctx context.Context, p events.Partition, seq events.StreamSeq) (events.Millis, error) {
	stream := StreamName(n.name, p)
	var m storedMessage
	err := n.c.retry(ctx, func() (err error) {
		m, err = n.c.getMessage(ctx, stream, map[string]any{"seq": seq})
		return err
	})
	return events.Millis(m.Time.UnixMilli()), failed(fmt.Sprintf("read message %d of %s", seq, stream), err)
}

package jetstream

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/events"
)

type lastMessage struct {
	Message
	header nats.Header
}

// writer reads who wrote a message, in which flush and at which place in it.
func (m *lastMessage) writer() (id string, flush uint64, pos int) {
	tag, add := m.header.Get(headerWriter), 0
	if batch := m.header.Get(headerBatchID); batch != "" {
		tag = batch
		seq, err := strconv.Atoi(m.header.Get(headerBatchSeq))
		if err != nil {
			return "", 0, 0
		}
		add = seq - 1
	}
	parts := strings.Split(tag, ".")
	if len(parts) < 3 {
		return tag, 0, 0
	}
	flush, err1 := strconv.ParseUint(parts[1], 10, 64)
	pos, err2 := strconv.Atoi(parts[2])
	if err1 != nil || err2 != nil {
		return tag, 0, 0
	}
	return parts[0], flush, pos + add
}

// lastOn reads the last message on a subject from the stream's leader, again and again until there is an answer.
func (c *Conn) lastOn(ctx context.Context, stream, subject string) (*lastMessage, error) {
	return c.retryLast(ctx, stream, subject, c.lastOnce)
}

func (c *Conn) retryLast(ctx context.Context, stream, subject string,
	once func(ctx context.Context, stream, subject string) (*lastMessage, error)) (m *lastMessage, err error) {
	err = c.retry(ctx, func() (err error) {
		m, err = once(ctx, stream, subject)
		return err
	})
	return m, failed("read the last message on "+subject, err)
}

// lastOnce is lastOn, once. Unlike a direct get, which any replica answers from what it has, it cannot miss
// what the leader has acknowledged.
func (c *Conn) lastOnce(ctx context.Context, stream, subject string) (*lastMessage, error) {
	a, err := c.getMessage(ctx, stream, map[string]any{"last_by_subj": subject})
	if err != nil {
		return nil, err
	}
	m := &lastMessage{Message: Message{
		Seq:     events.StreamSeq(a.Seq),
		Time:    events.Millis(a.Time.UnixMilli()),
		Subject: a.Subject,
		Data:    a.Data,
	}}
	if len(a.Header) > 0 {
		if m.header, err = nats.DecodeHeadersMsg(a.Header); err != nil {
			return nil, fmt.Errorf("headers of message %d: %w", m.Seq, err)
		}
	}
	return m, nil
}

// firstFrom is the sequence of the first message at or after seq, as the leader has it.
func (c *Conn) firstFrom(ctx context.Context, stream string, seq events.StreamSeq) (events.StreamSeq, error) {
	a, err := c.getMessage(ctx, stream, map[string]any{"seq": seq, "next_by_subj": ">"})
	return events.StreamSeq(a.Seq), err
}

type storedMessage struct {
	Subject string    `json:"subject"`
	Seq     uint64    `json:"seq"`
	Header  []byte    `json:"hdrs"`
	Data    []byte    `json:"data"`
	Time    time.Time `json:"time"`
}

// getMessage asks the leader of a stream for a message, once.
func (c *Conn) getMessage(ctx context.Context, stream string, args map[string]any) (storedMessage, error) {
	var a struct {
		Message storedMessage `json:"message"`
	}
	err := c.callOnce(ctx, "STREAM.MSG.GET."+stream, args, &a)
	return a.Message, err
}

// neverSeq is a sequence that no message has.
const neverSeq = math.MaxInt64

// errBehind: the replicas that answered do not have yet what the leader has acknowledged.
var errBehind = errors.New("no replica that answers has the last message yet")

// lastOwn reads the last message on a subject on which the caller may publish, with no permission to read anything
// else: the one that was last when it was called, or a later one. It tries until the context ends. The error wraps
// [ErrNotFound] if there is none.
func (c *Conn) lastOwn(ctx context.Context, stream, subject string) (*lastMessage, error) {
	return c.retryLast(ctx, stream, subject, c.lastOwnOnce)
}

// lastOwnOnce is lastOwn, for as long as one attempt takes. The leader says which message is the last; any replica may
// hand it over, and is asked again until it has it.
func (c *Conn) lastOwnOnce(ctx context.Context, stream, subject string) (*lastMessage, error) {
	deadline := time.Now().Add(c.attempt)
	// the smallest that the leader said: a writer that is faster than a replica does not keep us for ever
	wanted := uint64(math.MaxUint64)
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		last, err := c.askLast(ctx, stream, subject)
		behind := err
		switch {
		case err == nil && last == 0:
			return nil, noMessage()
		case err == nil:
			wanted = min(wanted, last)
			m, err := c.direct(ctx, stream, subject)
			if err == nil && uint64(m.Seq) >= wanted {
				return m, nil
			}
			if err != nil && classOf(err) != ErrNotFound {
				return nil, err
			}
			behind = fmt.Errorf("%w: the leader has %d", errBehind, last)
		case classOf(err) != ErrConflict: // a conflict: something on the subject is under way
			return nil, err
		}
		if time.Now().After(deadline) || !loop.Wait(ctx, pause) {
			return nil, behind
		}
	}
}

// askLast asks the leader of a stream for the sequence of the last message on a subject, 0 if there is none: by a
// message that expects what cannot be, so that it is refused, and the refusal has the number (nats-server
// server/stream.go and server/jetstream_batching.go, "last sequence by subject mismatch"). Nothing is stored,
// replicated or forced to the disk. An error of class [ErrConflict] says that a message on the subject is being stored
// at this moment.
func (c *Conn) askLast(ctx context.Context, stream, subject string) (uint64, error) {
	seq, err := c.store(ctx, stream, &nats.Msg{Subject: subject,
		Header: nats.Header{headerExpectedLast: {strconv.FormatUint(neverSeq, 10)}}})
	if err == nil {
		return 0, fmt.Errorf("%w: the server stored a message at %d that expected %d before it", ErrMismatch, seq,
			uint64(neverSeq))
	}
	var api *apiError
	if !errors.As(err, &api) || api.ErrCode != codeWrongLast {
		return 0, err
	}
	_, text, _ := strings.Cut(api.Description, ": ")
	last, bad := strconv.ParseUint(text, 10, 64)
	if bad != nil {
		return 0, fmt.Errorf("%w: the server does not say which message is the last: %q", ErrMismatch, api.Description)
	}
	return last, nil
}

// direct reads the last message on a subject from whichever replica answers, once.
func (c *Conn) direct(ctx context.Context, stream, subject string) (*lastMessage, error) {
	reply, err := c.request(ctx, &nats.Msg{Subject: c.api + "DIRECT.GET." + stream + "." + subject})
	if err != nil {
		return nil, err
	}
	switch status := reply.Header.Get("Status"); status {
	case "":
		return readDirect(reply)
	case "404":
		return nil, noMessage()
	default:
		return nil, fmt.Errorf("direct get: %s %s", status, reply.Header.Get("Description"))
	}
}

// readDirect reads an answer to a direct get (ADR-31).
func readDirect(m *nats.Msg) (*lastMessage, error) {
	seq, err := strconv.ParseUint(m.Header.Get("Nats-Sequence"), 10, 64)
	if err != nil {
		return nil, errors.New("the answer lacks its headers")
	}
	written, err := time.Parse(time.RFC3339Nano, m.Header.Get("Nats-Time-Stamp"))
	if err != nil {
		return nil, fmt.Errorf("the answer's time: %w", err)
	}
	return &lastMessage{header: m.Header, Message: Message{
		Seq: events.StreamSeq(seq), Time: events.Millis(written.UnixMilli()), Subject: m.Header.Get("Nats-Subject"),
		Data: m.Data,
	}}, nil
}

// noMessage is what the API says of a subject without messages.
func noMessage() error {
	return &apiError{Code: http.StatusNotFound, ErrCode: codeNoMessage, Description: "no message found"}
}

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

// writer returns the id of a message's writer, the flush, and the position in the flush.
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

// lastOn reads the last message on a subject from the stream's leader. It repeats the request until an answer arrives.
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

// lastOnce is a single attempt of lastOn. Unlike a direct get, which any replica answers, it includes everything that
// the leader has acknowledged.
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

// firstFrom returns the sequence of the first message at or after seq, from the leader.
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

// getMessage reads a message from the leader of a stream, once.
func (c *Conn) getMessage(ctx context.Context, stream string, args map[string]any) (storedMessage, error) {
	var a struct {
		Message storedMessage `json:"message"`
	}
	err := c.callOnce(ctx, "STREAM.MSG.GET."+stream, args, &a)
	return a.Message, err
}

// neverSeq is a sequence that no message has.
const neverSeq = math.MaxInt64

// errBehind: no answering replica has the last message that the leader has acknowledged.
var errBehind = errors.New("no replica that answers has the last message yet")

// lastOwn reads the last message on a subject on which the caller may publish, without any permission to read: the last
// message at the time of the call, or a later one. It retries until the context ends. The error wraps [ErrNotFound] if
// there is none.
func (c *Conn) lastOwn(ctx context.Context, stream, subject string) (*lastMessage, error) {
	return c.retryLast(ctx, stream, subject, c.lastOwnOnce)
}

// lastOwnOnce is a single attempt of lastOwn. The leader reports the sequence of the last message. Any replica may
// deliver the message, and lastOwnOnce repeats the request until a replica has it.
func (c *Conn) lastOwnOnce(ctx context.Context, stream, subject string) (*lastMessage, error) {
	deadline := time.Now().Add(c.attempt)
	// least sequence reported by the leader, so that a fast writer does not extend the loop for ever
	wanted := uint64(math.MaxUint64)
	for poll := (loop.Backoff{Min: time.Millisecond, Max: 100 * time.Millisecond}); ; {
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
		case classOf(err) != ErrConflict: // a conflict: a write on the subject is under way
			return nil, err
		}
		if time.Now().After(deadline) || !poll.Wait(ctx) {
			return nil, behind
		}
	}
}

// askLast returns the sequence of the last message on a subject from the stream's leader; 0 if there is none. It sends
// a message with an impossible expected sequence. The refusal contains the number (nats-server server/stream.go and
// server/jetstream_batching.go, "last sequence by subject mismatch"). Nothing is stored, replicated or synced. An error
// of class [ErrConflict] means that a message on the subject is being stored at the moment.
//
// askLast reads the number from the text, because the refusal has no field for it. STREAM.MSG.GET also reads from the
// leader, but its permission covers all subjects of the stream. A direct get may reach a replica behind the leader.
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
		return 0, fmt.Errorf("%w: the refusal has no last sequence: %q", ErrMismatch, api.Description)
	}
	return last, nil
}

// direct reads the last message on a subject from any replica, once.
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

// readDirect decodes an answer to a direct get (ADR-31).
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

// noMessage returns the API's error for a subject without messages.
func noMessage() error {
	return &apiError{Code: http.StatusNotFound, ErrCode: codeNoMessage, Description: "no message found"}
}

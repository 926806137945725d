package jetstream

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	// maxBatch is how many messages one atomic batch can have (nats-server server/stream.go,
	// streamDefaultMaxAtomicBatchSize).
	maxBatch = 1000

	// batchWindow is how many bytes of a batch may be under way before the server says that it has them: it
	// drops what it cannot queue (128 MiB by default), and the batch with it.
	batchWindow = 8 << 20

	// slowDisk is the speed below which a disk is taken for dead, in bytes per second.
	slowDisk = 4 << 20
)

// pubAck is the acknowledgement of a stored message or batch.
type pubAck struct {
	Stream string    `json:"stream"`
	Seq    uint64    `json:"seq"`
	Error  *apiError `json:"error"`
}

// ackTime is how long to wait for the acknowledgement of that many bytes.
func (c *Conn) ackTime(bytes int) time.Duration {
	return c.attempt + time.Duration(bytes)*time.Second/slowDisk
}

// store sends one message and waits until the stream has it, once.
func (c *Conn) store(ctx context.Context, stream string, m *nats.Msg) (seq uint64, err error) {
	err = c.tryFor(ctx, c.ackTime(len(m.Data)), m.Subject, func(ctx context.Context) error {
		reply, err := c.nc.RequestMsgWithContext(ctx, m)
		if err != nil {
			return err
		}
		seq, err = readAck(reply.Data, stream)
		return err
	})
	return seq, err
}

func readAck(data []byte, stream string) (uint64, error) {
	var ack pubAck
	if err := json.Unmarshal(data, &ack); err != nil {
		return 0, fmt.Errorf("acknowledgement %.64q: %w", data, err)
	}
	if ack.Error != nil {
		return 0, ack.Error
	}
	if ack.Stream != stream || ack.Seq == 0 {
		return 0, fmt.Errorf("%w: stored by stream %q at %d, not by %s", ErrMismatch, ack.Stream, ack.Seq, stream)
	}
	return ack.Seq, nil
}

// storeBatch sends messages as one atomic batch (ADR-50): all are stored one after the other, or none. It
// returns the sequence of the last. watch is the subject (or the prefix of all subjects, ending in '.') whose
// refusal ends it. An id must never be used twice.
//
// message(i) is asked for the messages in order; it may return the same one again and again, with other
// content. Headers of the batch are set here.
func (c *Conn) storeBatch(ctx context.Context, stream, watch, id string, n int,
	message func(i int) *nats.Msg) (last uint64, err error) {
	underway, total := 0, 0
	for i := range n {
		m := message(i)
		if m.Header == nil {
			m.Header = nats.Header{}
		}
		m.Header[headerBatchID] = []string{id}
		m.Header[headerBatchSeq] = []string{strconv.Itoa(i + 1)}
		commit := i == n-1
		if commit {
			m.Header[headerBatchCommit] = []string{"1"}
		}
		underway += len(m.Data)
		total += len(m.Data)
		if !commit && underway < batchWindow {
			if err := c.nc.PublishMsg(m); err != nil {
				return 0, sent(err)
			}
			continue
		}
		wait := c.ackTime(underway)
		if commit {
			wait = c.ackTime(total)
		}
		err := c.tryFor(ctx, wait, watch, func(ctx context.Context) error {
			reply, err := c.nc.RequestMsgWithContext(ctx, m)
			if err != nil {
				return err
			}
			if !commit && len(reply.Data) == 0 {
				return nil // the server has them so far
			}
			last, err = readAck(reply.Data, stream)
			return err
		})
		if err != nil {
			return 0, err
		}
		underway = 0
	}
	return last, nil
}

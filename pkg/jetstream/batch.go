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
	// maxBatch is the largest number of messages in an atomic batch (nats-server server/stream.go,
	// streamDefaultMaxAtomicBatchSize).
	maxBatch = 1000

	// batchWindow is the number of bytes of a batch to send before the server must acknowledge the receipt. The server
	// drops a batch beyond the limit of the queue (128 MiB by default).
	batchWindow = 8 << 20

	// slowDisk is the speed in bytes per second below which a disk counts as dead.
	slowDisk = 4 << 20
)

// pubAck is the acknowledgement of a stored message or batch.
type pubAck struct {
	Stream string    `json:"stream"`
	Seq    uint64    `json:"seq"`
	Error  *apiError `json:"error"`
}

// ackTime returns the longest wait for the acknowledgement of a number of bytes.
func (c *Conn) ackTime(bytes int) time.Duration {
	return c.attempt + time.Duration(bytes)*time.Second/slowDisk
}

// store sends one message once and waits for the acknowledgement of the stream.
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

// storeBatch sends messages as one atomic batch (ADR-50): the stream stores all messages in sequence, or none.
// storeBatch returns the sequence of the last message. A refusal of the subject watch ends the batch; watch may be a
// prefix of all subjects and then ends in '.'. An id must never be used twice.
//
// message(i) returns the messages in order. A single message may be reused with different contents. storeBatch sets the
// headers of the batch.
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
				return nil // received so far
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

package jetstream

import (
	"errors"
	"fmt"
	"time"
)

// ErrCrowded: the server refuses atomic batches on a stream because too many are open, on the stream (50 by default) or
// on the server (1,000). After a client has left batches open, further clients of the stream are blocked for ten
// seconds. [PublisherOptions.Crowded] receives the error.
var ErrCrowded = errors.New("too many atomic batches are open")

// The time without batches after a refusal. It doubles with every further refusal.
const (
	crowdedMin = 100 * time.Millisecond
	crowdedMax = 2 * time.Second
)

// crowd decides whether a publisher uses atomic batches, by the server's refusals. The publisher owns it.
//
// The server answers only the last message of a batch. After a refusal of the first message, the answer is the code of
// an incomplete batch. The next message is then sent as a separate batch, because the refusal of a single message has
// the cause.
type crowd struct {
	refused int       // consecutive refusals because of too many open batches
	again   time.Time // with refused: time of the next batch
	asks    bool      // the last batch was incomplete, and the cause is unknown
}

// probes reports whether the next message must be a batch of its own.
func (c *crowd) probes(now time.Time) bool { return c.asks || c.refused > 0 && !now.Before(c.again) }

// waits reports whether messages go one by one for now.
func (c *crowd) waits(now time.Time) bool { return c.refused > 0 && now.Before(c.again) }

// accepted records a stored batch. It returns true if the previous batch was refused.
func (c *crowd) accepted() (recovered bool) {
	recovered = c.refused > 0
	*c = crowd{}
	return recovered
}

// note records a refusal of a batch. It returns true if the cause is too many open batches.
func (c *crowd) note(code int, now time.Time) (crowded bool) {
	c.asks = code == codeAtomicIncomplete && !c.asks // an incomplete batch of one message has another cause
	if code != codeAtomicTooMany {
		return false
	}
	c.again = now.Add(min(crowdedMin<<min(c.refused, 10), crowdedMax))
	c.refused++
	return true
}

// crowded returns the error of a refusal on a stream.
func crowded(stream string, err error) error {
	return fmt.Errorf("stream %s: %w, on the stream or on the NATS server; events are stored one by one meanwhile: %w",
		stream, ErrCrowded, err)
}

package jetstream

import (
	"errors"
	"fmt"
	"time"
)

// ErrCrowded: the server refuses atomic batches on a stream because too many are open, on the stream (50 by default) or
// on the server (1,000). A client that leaves batches open blocks the others of its stream for ten seconds each time.
// Passed to [PublisherOptions.Crowded].
var ErrCrowded = errors.New("too many atomic batches are open")

// The time during which a publisher does without batches after the server has refused one. It doubles while the server
// goes on refusing.
const (
	crowdedMin = 100 * time.Millisecond
	crowdedMax = 2 * time.Second
)

// crowd decides whether a publisher uses atomic batches, by the server's refusals. Its owner is the publisher.
//
// The server answers only the last message of a batch, with the code of an incomplete batch, if it has refused the
// first. So the message after such an answer is sent as a batch of its own: its refusal has the cause.
type crowd struct {
	refused int       // times in a row that too many batches were open
	again   time.Time // with refused: when to try a batch again
	asks    bool      // the last batch was incomplete, and the cause is not known yet
}

// probes reports whether the next message is to be sent as a batch of its own.
func (c *crowd) probes(now time.Time) bool { return c.asks || c.refused > 0 && !now.Before(c.again) }

// waits reports whether messages go one by one for now.
func (c *crowd) waits(now time.Time) bool { return c.refused > 0 && now.Before(c.again) }

// accepted notes that the server has stored a batch. It reports true if it had refused the one before.
func (c *crowd) accepted() (recovered bool) {
	recovered = c.refused > 0
	*c = crowd{}
	return recovered
}

// note notes a refusal of a batch, and reports whether its cause is that too many batches are open.
func (c *crowd) note(code int, now time.Time) (crowded bool) {
	c.asks = code == codeAtomicIncomplete && !c.asks // an incomplete batch of one message has another cause
	if code != codeAtomicTooMany {
		return false
	}
	c.again = now.Add(min(crowdedMin<<min(c.refused, 10), crowdedMax))
	c.refused++
	return true
}

// crowded is the error of a refusal on a stream.
func crowded(stream string, err error) error {
	return fmt.Errorf("stream %s: %w, on the stream or on the NATS server; events are stored one by one meanwhile: %w",
		stream, ErrCrowded, err)
}

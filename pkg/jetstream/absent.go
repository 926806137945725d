package jetstream

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Absent sends a message to the shim of each rank, and returns the ranks without a subscriber by the NATS server's
// report. Shims must not answer the message. After the end of a shim's process, the shim is absent as soon as the
// kernel has closed the connection. A shim that hangs is not absent.
func (n *Namespace) Absent(ctx context.Context, ranks []events.RankKey, body []byte) (absent []events.RankKey,
	err error) {
	if len(ranks) == 0 {
		return nil, nil
	}
	if !n.c.Connected() { // messages would wait in the buffer of the connection
		return nil, fmt.Errorf("look for shims: %w", ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(ctx, absentTime)
	defer cancel()
	inbox := n.c.nc.NewInbox()
	replies := make(chan *nats.Msg, len(ranks))
	sub, err := n.c.nc.ChanSubscribe(inbox+".*", replies)
	if err != nil {
		return nil, failed("look for shims", err)
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only without a connection
	for i, key := range ranks {
		p, err := n.PartitionOf(key.Instance)
		if err != nil {
			return nil, err
		}
		subject, err := n.name.ControlRank(p, key)
		if err != nil {
			return nil, err
		}
		m := message(subject, ContentJSON, body)
		m.Reply = inbox + "." + strconv.Itoa(i)
		if err := n.c.nc.PublishMsg(m); err != nil {
			return nil, failed("look for shims", err)
		}
	}
	// The server handles the messages of a connection in order, so its reports precede the answer to this flush.
	if err := n.c.nc.FlushWithContext(ctx); err != nil {
		return nil, failed("look for shims", err)
	}
	for {
		select {
		case m := <-replies:
			i, err := strconv.Atoi(m.Subject[strings.LastIndexByte(m.Subject, '.')+1:])
			if err == nil && i < len(ranks) && m.Header.Get("Status") == noResponders {
				absent = append(absent, ranks[i])
			}
		default:
			return absent, nil
		}
	}
}

// absentTime bounds one call of Absent.
const absentTime = 5 * time.Second

// noResponders is the status of the server's report that a subject has no subscriber.
const noResponders = "503"

package jetstream

import (
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// Outbox sends requests without waiting for them. One subscription, for as long as the outbox is open, takes all
// replies; each is told by the id of its request. That costs a request nothing but its message, and a reply that comes
// late finds its way too.
type Outbox struct {
	c     *Conn
	inbox string // ends in '.'
	sub   *nats.Subscription
}

// OpenOutbox opens an outbox. take is called with each reply, from one goroutine, and must return soon. Its error is as
// that of [Conn.Request]: [*ServiceError] (the reply is given too) or [ErrNoResponder]. A request of which nothing
// comes back is not told.
func (c *Conn) OpenOutbox(take func(id uint64, r Reply, err error)) (*Outbox, error) {
	o := &Outbox{c: c, inbox: c.nc.NewInbox() + "."}
	var err error
	o.sub, err = c.nc.Subscribe(o.inbox+"*", func(m *nats.Msg) {
		id, err := strconv.ParseUint(strings.TrimPrefix(m.Subject, o.inbox), 36, 64)
		if err != nil {
			return // nobody that we asked
		}
		if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
			take(id, Reply{}, ErrNoResponder)
			return
		}
		reply, err := replyOf(m)
		take(id, reply, err)
	})
	if err != nil {
		return nil, failed("subscribe to "+o.inbox+"*", err)
	}
	return o, nil
}

// Send sends a request. patience says how long its reply is waited for; it travels with it. Errors: [ErrTooLarge],
// [ErrUnavailable] without a connection.
func (o *Outbox) Send(id uint64, subject, contentType string, patience time.Duration, body []byte) error {
	m := &nats.Msg{Subject: subject, Reply: o.inbox + strconv.FormatUint(id, 36), Data: body, Header: nats.Header{
		headerDeadline: []string{strconv.FormatInt(max(patience.Milliseconds(), 1), 10)},
	}}
	if contentType != "" {
		m.Header[headerContentType] = []string{contentType}
	}
	return failed("request "+subject, o.c.nc.PublishMsg(m))
}

// Close ends it: what comes later is not told.
func (o *Outbox) Close() {
	_ = o.sub.Unsubscribe() // fails only without a connection, and then nothing comes
}

// replyOf reads a message that answers a request.
func replyOf(m *nats.Msg) (Reply, error) {
	answer := Reply{ContentType: m.Header.Get(headerContentType), Body: m.Data}
	text := m.Header.Get(headerErrorCode)
	if text == "" {
		return answer, nil
	}
	code, err := strconv.Atoi(text)
	if err != nil {
		code = CodeInternal
	}
	return answer, &ServiceError{Code: code, Description: m.Header.Get(headerError)}
}

package sharedstore

import (
	"encoding/binary"
	"fmt"
	"iter"
	"math"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// storeEvent is one change of a shared store's content, as a Mooncake master publishes it (kvcache-ai/Mooncake ›
// docs/source/design/kv-event/publisher-design.md). An object exists while at least one medium has it.
type storeEvent struct {
	Kind   events.Kind // stored and removed concern one object in one medium, cleared all objects of a tenant
	Tenant string      // "default" if the event has none
	Object string      // the object's key; of stored and removed events
	Medium string      // "cpu", "disk"; of stored and removed events
}

// defaultTenant is the tenant of objects without an explicit tenant. The master's HTTP interface supports no other
// tenant.
const defaultTenant = "default"

// maxMessage bounds the bytes of a master's message.
const maxMessage = 64 << 20

// readEvents reads the third frame of a Mooncake master's message, [timestamp_ms, [event maps], dp_rank], which
// follows an empty topic and a big-endian number. The whole message is checked first; the events are returned one at a
// time, in order. The payload must not change meanwhile. The error wraps [events.ErrMalformed]; the content of the
// message is then unknown. Unused fields are skipped. An event of an unknown type is an error, since its effect on the
// store is unknown.
func readEvents(payload []byte) (iter.Seq[storeEvent], error) {
	if len(payload) > maxMessage {
		return nil, malformed(0, "a store's message of %d bytes: at most %d", len(payload), maxMessage)
	}
	r := &msgp.Reader{Data: payload}
	if n, ok := r.Array(); !ok || n < 2 || !r.Skip() {
		return nil, malformed(r.At, "no [timestamp, events, rank]")
	}
	n, ok := r.Array()
	if !ok {
		return nil, malformed(r.At, "no array of a store's events")
	}
	first := r.At
	for range n {
		if _, err := readStoreEvent(r); err != nil {
			return nil, err
		}
	}
	return func(yield func(storeEvent) bool) {
		r := &msgp.Reader{Data: payload, At: first}
		for range n {
			f, _ := readStoreEvent(r) // the same bytes had no error
			if !yield(f.event()) {
				return
			}
		}
	}, nil
}

// storeFields has the fields of an event. The texts refer to the payload.
type storeFields struct {
	kind                   events.Kind
	tenant, object, medium []byte
}

func (f *storeFields) event() storeEvent {
	e := storeEvent{Kind: f.kind, Tenant: defaultTenant}
	if f.tenant != nil {
		e.Tenant = string(f.tenant)
	}
	if f.kind != events.Cleared {
		e.Object, e.Medium = string(f.object), string(f.medium)
	}
	return e
}

func readStoreEvent(r *msgp.Reader) (f storeFields, err error) {
	var kind []byte
	at := r.At
	fault := r.EachKey(func(key string) bool {
		var into *[]byte
		switch key {
		case "event_type":
			into = &kind
		case "tenant_id":
			into = &f.tenant
		case "object_key":
			into = &f.object
		case "medium":
			into = &f.medium
		default:
			return r.Skip()
		}
		if r.Null() {
			return true
		}
		text, ok := r.Str()
		*into = text
		return ok
	})
	if fault != "" {
		return f, malformed(r.At, "%s", fault)
	}
	switch string(kind) {
	case "stored":
		f.kind = events.Stored
	case "removed":
		f.kind = events.Removed
	case "cleared":
		f.kind = events.Cleared
		return f, nil
	default:
		return f, malformed(at, "a store's event of type %.40q", kind)
	}
	if len(f.object) == 0 {
		return f, malformed(at, "a store's event that names no object")
	}
	return f, nil
}

// Message carries a message of a store's master from a shim to the nodes. It is published without acknowledgement:
// a gap in the numbers shows a loss, and the reader then asks the store itself.
type Message struct {
	Kind MessageKind

	// Session identifies an unbroken part of the master's stream; a shim chooses it at random. Messages between two
	// sessions may be lost.
	Session uint64

	// Number is the master's number of a batch, consecutive; of Alive, the number of the last batch.
	// Lost has none.
	Number uint64

	Payload []byte // of a batch, as the master sent it; see [readEvents]
}

// MessageKind is the kind of a [Message]. A wire constant: do not renumber.
type MessageKind uint8

// The kinds of a store's messages.
const (
	Batch MessageKind = 1 // the master published a batch
	Alive MessageKind = 2 // the master has published no batch since the last one
	Lost  MessageKind = 3 // messages are missing: all earlier messages are void
)

// The head of a message: version, kind, session, number. The payload follows.
const (
	messageVersion = 1
	messageHead    = 18
)

// AppendMessage appends the bytes of a message.
func AppendMessage(dst []byte, m *Message) []byte {
	dst = append(dst, messageVersion, byte(m.Kind))
	dst = binary.BigEndian.AppendUint64(dst, m.Session)
	dst = binary.BigEndian.AppendUint64(dst, m.Number)
	return append(dst, m.Payload...)
}

// readMessage decodes the output of AppendMessage. The payload refers to the input. The error wraps
// [events.ErrMalformed] or [events.ErrVersion].
func readMessage(data []byte) (m Message, err error) {
	if len(data) < messageHead {
		return m, malformed(len(data), "the end of a store's message")
	}
	if data[0] != messageVersion {
		return m, fmt.Errorf("shared store: %w: a store's message of version %d, and this program reads version %d",
			events.ErrVersion, data[0], messageVersion)
	}
	m = Message{Kind: MessageKind(data[1]), Session: binary.BigEndian.Uint64(data[2:]),
		Number: binary.BigEndian.Uint64(data[10:]), Payload: data[messageHead:]}
	if m.Kind < Batch || m.Kind > Lost || m.Kind != Batch && len(m.Payload) > 0 ||
		m.Number == math.MaxUint64 {
		return Message{}, malformed(1, "a store's message of kind %d, number %d, %d bytes", data[1], m.Number,
			len(m.Payload))
	}
	return m, nil
}

// malformed returns an error that wraps [events.ErrMalformed] and states the position and the fault.
func malformed(at int, format string, args ...any) error {
	return fmt.Errorf("shared store: %w: byte %d: %s", events.ErrMalformed, at, fmt.Sprintf(format, args...))
}

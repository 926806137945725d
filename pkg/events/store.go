package events

import (
	"encoding/binary"
	"fmt"
	"iter"
	"math"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// StoreEvent is one change of a shared store's content, as a Mooncake master publishes it (kvcache-ai/Mooncake ›
// docs/source/design/kv-event/publisher-design.md). An object exists while at least one medium has it.
type StoreEvent struct {
	Kind   Kind   // Stored and Removed concern one object in one medium, Cleared all objects of a tenant
	Tenant string // "default" if the event has none
	Object string // the object's key; of stored and removed events
	Medium string // "cpu", "disk"; of stored and removed events
}

// DefaultTenant is the tenant of objects without an explicit tenant. The master's HTTP interface supports no other
// tenant.
const DefaultTenant = "default"

// ReadStoreEvents reads the third frame of a Mooncake master's message, [timestamp_ms, [event maps], dp_rank], which
// follows an empty topic and a big-endian number. The whole message is checked first; the events are returned one at a
// time, in order. The payload must not change meanwhile. The error wraps [ErrMalformed]; the content of the message is
// then unknown. Unused fields are skipped. An event of an unknown type is an error, since its effect on the store is
// unknown.
func ReadStoreEvents(payload []byte) (iter.Seq[StoreEvent], error) {
	if len(payload) > maxPayload {
		return nil, malformed(0, "a store's message of %d bytes: at most %d", len(payload), maxPayload)
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
	return func(yield func(StoreEvent) bool) {
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
	kind                   Kind
	tenant, object, medium []byte
}

func (f *storeFields) event() StoreEvent {
	e := StoreEvent{Kind: f.kind, Tenant: DefaultTenant}
	if f.tenant != nil {
		e.Tenant = string(f.tenant)
	}
	if f.kind != Cleared {
		e.Object, e.Medium = string(f.object), string(f.medium)
	}
	return e
}

func readStoreEvent(r *msgp.Reader) (f storeFields, err error) {
	var kind []byte
	at := r.At
	err = each(r, func(key string) bool {
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
	if err != nil {
		return f, err
	}
	switch string(kind) {
	case "stored":
		f.kind = Stored
	case "removed":
		f.kind = Removed
	case "cleared":
		f.kind = Cleared
		return f, nil
	default:
		return f, malformed(at, "a store's event of type %.40q", kind)
	}
	if len(f.object) == 0 {
		return f, malformed(at, "a store's event that names no object")
	}
	return f, nil
}

// StoreMessage carries a message of a store's master from a shim to the nodes. It is published without acknowledgement:
// a gap in the numbers shows a loss, and the reader then asks the store itself.
type StoreMessage struct {
	Kind StoreMessageKind

	// Session identifies an unbroken part of the master's stream; a shim chooses it at random. Messages between two
	// sessions may be lost.
	Session uint64

	// Number is the master's number of a batch, consecutive; of StoreAlive, the number of the last batch.
	// StoreLost has none.
	Number uint64

	Payload []byte // of a batch, as the master sent it; see [ReadStoreEvents]
}

// StoreMessageKind is the kind of a [StoreMessage]. A wire constant: do not renumber.
type StoreMessageKind uint8

// The kinds of a store's messages.
const (
	StoreBatch StoreMessageKind = 1 // the master published a batch
	StoreAlive StoreMessageKind = 2 // the master has published no batch since the last one
	StoreLost  StoreMessageKind = 3 // messages are missing: all earlier messages are void
)

// The head of a message: version, kind, session, number. The payload follows.
const (
	storeMessageVersion = 1
	storeMessageHead    = 18
)

// AppendStoreMessage appends the bytes of a message.
func AppendStoreMessage(dst []byte, m *StoreMessage) []byte {
	dst = append(dst, storeMessageVersion, byte(m.Kind))
	dst = binary.BigEndian.AppendUint64(dst, m.Session)
	dst = binary.BigEndian.AppendUint64(dst, m.Number)
	return append(dst, m.Payload...)
}

// ReadStoreMessage decodes the output of AppendStoreMessage. The payload refers to the input. The error wraps
// [ErrMalformed] or [ErrVersion].
func ReadStoreMessage(data []byte) (m StoreMessage, err error) {
	if len(data) < storeMessageHead {
		return m, malformed(len(data), "the end of a store's message")
	}
	if data[0] != storeMessageVersion {
		return m, fmt.Errorf("events: %w: a store's message of version %d, and this program reads version %d",
			ErrVersion, data[0], storeMessageVersion)
	}
	m = StoreMessage{Kind: StoreMessageKind(data[1]), Session: binary.BigEndian.Uint64(data[2:]),
		Number: binary.BigEndian.Uint64(data[10:]), Payload: data[storeMessageHead:]}
	if m.Kind < StoreBatch || m.Kind > StoreLost || m.Kind != StoreBatch && len(m.Payload) > 0 ||
		m.Number == math.MaxUint64 {
		return StoreMessage{}, malformed(1, "a store's message of kind %d, number %d, %d bytes", data[1], m.Number,
			len(m.Payload))
	}
	return m, nil
}

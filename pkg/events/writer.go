package events

import (
	"fmt"
	"slices"
)

// BatchWriter encodes a batch event by event, so that its events need not be kept. The bytes are those of
// [AppendBatch]. The zero value is an empty batch.
type BatchWriter struct {
	buf  []byte // room for the head, then the events
	room int    // bytes
	n    int
}

// headRoom is the room for a batch's head without its model's name.
const headRoom = 64

// NewBatchWriter returns an empty batch of a model. Its first buffer has room for bytes of events.
func NewBatchWriter(model string, bytes int) BatchWriter {
	room := headRoom + len(model)
	return BatchWriter{buf: make([]byte, room, room+bytes), room: room}
}

// Add appends an event and keeps nothing of it. It fails, with the batch as it was, if the event does not hold together
// ([Event.Check]).
func (w *BatchWriter) Add(e *Event) error {
	if err := e.check(); err != nil {
		return fmt.Errorf("events: cannot encode batch: event %d: %w", w.n, err)
	}
	w.buf = appendEvent(w.buf, e)
	w.n++
	return nil
}

// Len returns the number of events.
func (w *BatchWriter) Len() int { return w.n }

// Finish writes the head before the events and returns the encoded batch. h.Events is not read. The batch shares its
// memory with w, to which nothing may be added afterwards. Finish may be called again.
func (w *BatchWriter) Finish(h *BatchHeader) []byte {
	size := headSize(h, w.n)
	if size > w.room { // w was made for a shorter name
		w.buf = slices.Concat(make([]byte, size), w.buf[w.room:])
		w.room = size
	}
	begin := w.room - size
	appendHead(w.buf[begin:begin], h, w.n)
	return w.buf[begin:len(w.buf):len(w.buf)]
}

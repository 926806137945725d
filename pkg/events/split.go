package events

import "fmt"

// MinBatchSize is the smallest limit that SplitBatches takes: it holds the largest event (MaxBlocksPerEvent blocks with their
// local hashes, 64 KiB) and a header with a model name of moderate length.
const MinBatchSize = 80_000

// Mark says where an engine's message ends: once the first Events events are published, the log stands at Cursor in the
// engine's stream.
type Mark struct {
	Events int
	Cursor Cursor
}

// SplitBatches cuts whole into consecutive batches of which none takes more than limit bytes, and appends them to dst.
// There is at least one, even if whole has no events: the engine's messages count although nothing came of them.
//
// marks say which cursor each part gets, in the order of the engine's stream. The first one is where the log stands
// before whole, with Events 0 and, if the engine's message after that was begun, the number of its events that are
// published already in Cursor.Partial. After it comes one mark for each engine message that ends within whole, with
// Partial 0. A part that ends where a message does gets that message's cursor; one that ends inside a message gets the
// cursor of the message before and, in Partial, how many of the message's events are published by then. whole.Cursor is
// not looked at. whole.Shutdown goes to the last part.
//
// So a shim that has one engine message's events in whole passes
//
//	[]Mark{{0, before}, {len(whole.Events), after}}
//
// and one that gathers several messages into one publication adds a mark for each of them. The parts' events are slices of
// whole.Events.
func SplitBatches(dst []Batch, whole *Batch, marks []Mark, limit int) ([]Batch, error) {
	if limit < MinBatchSize {
		return dst, fmt.Errorf("events: batches of at most %d bytes: a limit must be %d bytes or more, since an event of %d blocks takes 64 KiB",
			limit, MinBatchSize, MaxBlocksPerEvent)
	}
	if err := checkMarks(marks, len(whole.Events)); err != nil {
		return dst, err
	}
	parts := len(dst)
	for begin := 0; ; {
		part := *whole
		part.FirstID += EventID(begin)
		part.Events = nil
		part.Cursor = Cursor{Known: true, Seq: 1<<64 - 1, Digest: 1<<64 - 1, Partial: 1<<32 - 1} // the longest one
		size := part.headSize(1 << 16)
		end := begin
		for ; end < len(whole.Events); end++ {
			more := whole.Events[end].EncodedSize()
			if size+more > limit {
				break
			}
			size += more
		}
		if end == begin && begin < len(whole.Events) {
			return dst[:parts], fmt.Errorf("events: event %d takes %d bytes and the header %d: more than the limit of %d",
				begin, whole.Events[begin].EncodedSize(), size, limit)
		}
		for len(marks) > 1 && marks[1].Events <= end {
			marks = marks[1:]
		}
		part.Events = whole.Events[begin:end:end]
		part.Cursor = marks[0].Cursor
		part.Cursor.Partial += uint32(end - marks[0].Events)
		part.Shutdown = whole.Shutdown && end == len(whole.Events)
		dst = append(dst, part)
		if begin = end; begin == len(whole.Events) {
			return dst, nil
		}
	}
}

func checkMarks(marks []Mark, events int) error {
	if len(marks) == 0 || marks[0].Events != 0 {
		return fmt.Errorf("events: the first mark must say where the log stood before the first event")
	}
	for i, m := range marks[1:] {
		if m.Events < marks[i].Events || m.Events > events {
			return fmt.Errorf("events: mark %d is at event %d: want one from %d to %d", i+1, m.Events, marks[i].Events, events)
		}
		if m.Cursor.Partial != 0 {
			return fmt.Errorf("events: mark %d has %d events of a message beyond it", i+1, m.Cursor.Partial)
		}
	}
	return nil
}

package dump

import "github.com/kvatlas/kvatlas/pkg/events"

// Line is one RouterEvent.
type Line = events.RouterEvent

// Append appends an event as one line, with its end; groups go with a cleared one.
func Append(dst []byte, key events.RankKey, id events.EventID, e *events.Event, groups ...events.Event) []byte {
	return events.AppendRouterEvent(dst, key, id, e, groups...)
}

// Read takes a line apart, as any release of Dynamo wrote it; see [events.ReadRouterEvent].
func Read(line []byte) (Line, error) { return events.ReadRouterEvent(line) }

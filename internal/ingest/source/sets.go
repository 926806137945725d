package source

import (
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// setDecoder decodes the lines of router events. In Dynamo's events, blocks form a set: a removal ends any number of
// stores. The log counts copies, so the decoder emits a stored block once, until a removal.
type setDecoder struct{ held map[heldBlock]struct{} }

type heldBlock struct {
	tier  events.Tier
	group events.GroupIndex
	block events.BlockHash
}

// newSetDecoder returns the decoder of a rank.
func newSetDecoder() shim.Whole {
	d := &setDecoder{}
	return shim.Whole{Decode: d.decode, Forget: d.forget}
}

// forget empties the set.
func (d *setDecoder) forget() { clear(d.held) }

// decode decodes a line, which is empty for a skipped event.
func (d *setDecoder) decode(line []byte) (m events.Message, err error) {
	if len(line) == 0 {
		return m, nil
	}
	e, err := events.ReadRouterEvent(line)
	if err != nil {
		return m, err
	}
	if d.held == nil {
		d.held = map[heldBlock]struct{}{}
	}
	for _, e := range e.Events() {
		switch e.Kind {
		case events.Stored:
			m.Events = d.store(m.Events, e)
			continue
		case events.Removed:
			for _, b := range e.Blocks {
				delete(d.held, heldBlock{e.Tier, e.Group, b})
			}
		default:
			d.forget()
		}
		m.Events = append(m.Events, e)
	}
	return m, nil
}

// store appends the new blocks of a stored event. An event of a KV-cache group has no local hashes. Without blocks, it
// describes the group.
func (d *setDecoder) store(to []events.Event, e events.Event) []events.Event {
	if len(e.Blocks) == 0 {
		return append(to, e)
	}
	for i := 0; i < len(e.Blocks); {
		from := i
		for ; i < len(e.Blocks); i++ {
			key := heldBlock{e.Tier, e.Group, e.Blocks[i]}
			if _, held := d.held[key]; held {
				break
			}
			d.held[key] = struct{}{}
		}
		if i > from {
			part := e
			part.Blocks = e.Blocks[from:i]
			if len(e.Locals) > 0 {
				part.Locals = e.Locals[from:i]
				if from > 0 {
					part.HasParent, part.Parent = true, e.Blocks[from-1]
				}
			}
			to = append(to, part)
		}
		i++
	}
	return to
}

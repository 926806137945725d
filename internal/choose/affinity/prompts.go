package affinity

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Sessions without an id: DESIGN.md has the reasons.

// MaxPrompts is the largest number of ends of prompts.
const MaxPrompts = 4 * MaxSessions

const (
	// promptMark begins the session of the key of a prompt's end. The eight bytes of the hash follow. No session id
	// begins with this byte, because ids are UTF-8.
	promptMark = '\xff'

	// nowhere is the worker of an end without a session. It is no valid worker name.
	nowhere = events.WorkerID("\xff")

	// endedFor is the time for which nodes keep the end of a prompt after the session's next prompt. Nodes that receive
	// the two in the wrong order then agree that the first has ended.
	endedFor = time.Second
)

// PromptKey returns the key of a prompt without a session id, from the hash of its last whole block.
func PromptKey(model string, last events.SeqHash) Key {
	return Key{model, string(binary.BigEndian.AppendUint64([]byte{promptMark}, uint64(last)))}
}

// end returns the hash in a key of [PromptKey].
func (k Key) end() (last events.SeqHash, ok bool) {
	if len(k.Session) != 9 || k.Session[0] != promptMark {
		return 0, false
	}
	return events.SeqHash(binary.BigEndian.Uint64([]byte(k.Session[1:]))), true
}

// String returns the key for people.
func (k Key) String() string {
	if last, ok := k.end(); ok {
		return fmt.Sprintf("%s%016x", promptText, uint64(last))
	}
	return k.Session
}

// insert adds a binding to the maps.
func (m *Machine) insert(b *binding) {
	m.bindings[b.key] = b
	last, ok := b.key.end()
	if !ok {
		return
	}
	if m.ends[b.key.Model] == nil {
		m.ends[b.key.Model] = map[events.SeqHash]*binding{}
	}
	m.ends[b.key.Model][last] = b
	m.prompts++
}

// remove removes a binding from the maps.
func (m *Machine) remove(b *binding) {
	m.detach(b)
	delete(m.bindings, b.key)
	delete(m.leased, b)
	last, ok := b.key.end()
	if !ok {
		return
	}
	m.prompts--
	if delete(m.ends[b.key.Model], last); len(m.ends[b.key.Model]) == 0 {
		delete(m.ends, b.key.Model)
	}
}

// full reports whether the number of bindings of the key's kind is at its limit.
func (m *Machine) full(key Key) bool {
	if _, ok := key.end(); ok {
		return m.prompts >= m.cfg.Prompts
	}
	return len(m.bindings)-m.prompts >= m.cfg.Sessions
}

// Follow returns the rank of the session that a prompt without an id continues: the session's last prompt ended with a
// whole block of the new prompt before its last one. seq are the sequence hashes of the prompt's whole blocks.
func (m *Machine) Follow(now time.Duration, model string, seq []events.SeqHash) (events.RankKey, bool) {
	b := m.continued(now, model, seq)
	if b == nil {
		return events.RankKey{}, false
	}
	return b.rank, true
}

// continued returns the binding of the session that a prompt continues; nil if there is none.
func (m *Machine) continued(now time.Duration, model string, seq []events.SeqHash) *binding {
	ends := m.ends[model]
	if len(ends) == 0 {
		return nil
	}
	for i := len(seq) - 2; i >= 0; i-- {
		b := ends[seq[i]]
		switch {
		case b == nil || b.ends <= now:
		case b.rank.Instance == nowhere:
			return nil
		default:
			return b
		}
	}
	return nil
}

// BindPrompt records the booking of a prompt without a session id on a rank. The binding of the continued session moves
// from the last prompt to the new one. If another prompt ended with the same block, the end belongs to no session from
// now on, and BindPrompt returns 0 and no error. The error is [ErrFull].
func (m *Machine) BindPrompt(
	now time.Duration, model string, seq []events.SeqHash, rank events.RankKey, request string,
) (how How, from events.RankKey, err error) {
	m.now = now
	if len(seq) == 0 {
		return 0, from, nil
	}
	key := PromptKey(model, seq[len(seq)-1])
	if m.bindings[key] == nil && m.full(key) {
		if m.reap(now); m.full(key) {
			m.Counts.Full++
			return 0, from, fmt.Errorf("%w: %d prompts", ErrFull, m.prompts)
		}
	}
	if b := m.bindings[key]; b != nil && b.ends > now {
		if m.Counts.Unclear++; b.rank.Instance == nowhere {
			m.use(b)
		} else {
			m.release(b)
			m.assign(b, events.RankKey{Instance: nowhere}, m.cfg.TTL)
		}
		return 0, from, nil
	}
	how = Made
	if b := m.continued(now, model, seq); b != nil {
		m.Counts.Continued++
		if how, from = Kept, b.rank; b.rank != rank {
			how = Moved
		}
		m.release(b)
		m.assign(b, events.RankKey{Instance: nowhere}, min(endedFor, m.cfg.TTL))
	}
	switch how {
	case Made:
		m.Counts.Made++
	case Kept:
		m.Counts.Kept++
	case Moved:
		m.Counts.Moved++
	}
	b := m.bindings[key]
	if b == nil {
		b = &binding{key: key}
	}
	m.release(b)
	m.assign(b, rank, m.cfg.TTL)
	m.lease(b, request)
	return how, from, nil
}

// release ends the leases of a binding: requests of the previous session do not hold it.
func (m *Machine) release(b *binding) {
	b.leases = nil
	delete(m.leased, b)
}

// lease keeps a binding alive during a request.
func (m *Machine) lease(b *binding, request string) {
	if request == "" {
		return
	}
	if len(b.leases) == maxLeases {
		b.leases = slices.Delete(b.leases, 0, 1)
	}
	b.leases = append(b.leases, request)
	m.leased[b] = struct{}{}
}

package affinity

import (
	"strconv"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Bound is a session with a rank.
type Bound struct {
	Key  Key
	Rank events.RankKey
	Idle time.Duration // since the last use, as far as this node has received it
	Left time.Duration // until the end without a further use
}

// Bound returns the sessions with a rank for which pick returns true, in no order.
func (m *Machine) Bound(now time.Duration, pick func(Key) bool) (list []Bound) {
	for key, b := range m.bindings {
		if pick(key) && b.live(now) {
			list = append(list, m.bound(now, b))
		}
	}
	return list
}

// Unbind ends the binding of a session on all nodes. The second result is false if the session has no rank. Requests
// under way stay on their workers and do not bind the session again.
func (m *Machine) Unbind(now time.Duration, key Key) (Bound, bool) {
	m.now = now
	b := m.bindings[key]
	if b == nil || !b.live(now) {
		return Bound{}, false
	}
	ended := m.bound(now, b)
	m.remove(b)
	m.Machine.End(now, b.at, false)
	return ended, true
}

// live reports whether a binding is to a rank and has not ended.
func (b *binding) live(now time.Duration) bool { return b.ends > now && b.rank.Instance != nowhere }

func (m *Machine) bound(now time.Duration, b *binding) Bound {
	left := b.ends - now
	return Bound{Key: b.key, Rank: b.rank, Idle: max(m.cfg.TTL-left, 0), Left: left}
}

// promptText begins the id of a prompt for people.
const promptText = "prompt:"

// KeysOf returns the keys that an id for people may mean: a session with this id, and the prompt of an id of
// [Key.String].
func KeysOf(model, id string) []Key {
	keys := []Key{{model, id}}
	if text, prompt := strings.CutPrefix(id, promptText); prompt && len(text) == 16 {
		if last, err := strconv.ParseUint(text, 16, 64); err == nil {
			keys = append(keys, PromptKey(model, events.SeqHash(last)))
		}
	}
	return keys
}

// Prompt reports whether the key is of a session without an id.
func (k Key) Prompt() bool {
	_, prompt := k.end()
	return prompt
}

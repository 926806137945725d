package vllm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"
	"sync"

	"github.com/vmihailenco/msgpack/v5"
)

// twin is the announced state of an engine's life. It keeps all past states: a version is the number of changes before,
// and a change is a stored or removed block of a group, or a clear.
//
// It shares no code with kvatlas. It is safe for concurrent use.
type twin struct {
	blockSize int

	mu       sync.Mutex
	changed  chan struct{} // closed when the next message is applied
	err      error         // why no more messages are applied
	version  int
	messages []message
	events   []int // the version after every event
	names    map[place]string
	groups   map[int]*group
}

// message is a message of the engine.
type message struct {
	before  int  // version
	removed int  // number of removed blocks
	cleared bool // the first event is a clear
}

// place is a block by content: the engine's name of the block before, and the block's own tokens and extra keys.
type place struct{ parent, content string }

// group is a group of layers in the engine.
type group struct {
	window int                 // tokens; 0: full attention
	held   map[string][]change // by the engine's name of a block
}

// change is the number of a block's copies from a version on.
type change struct{ version, copies int }

func newTwin(blockSize int) *twin {
	return &twin{blockSize: blockSize, changed: make(chan struct{}), names: map[place]string{},
		groups: map[int]*group{}}
}

// holds reports whether the group held a block at a version.
func (g *group) holds(name string, version int) bool {
	changes := g.held[name]
	after := sort.Search(len(changes), func(i int) bool { return changes[i].version > version })
	return after > 0 && changes[after-1].copies > 0
}

// copies is how many copies of a block the group holds now.
func (g *group) copies(name string) int {
	if changes := g.held[name]; len(changes) > 0 {
		return changes[len(changes)-1].copies
	}
	return 0
}

// apply applies a message from the engine's socket: topic, number, payload.
func (t *twin) apply(frames [][]byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err == nil {
		t.err = t.applyMessage(frames)
	}
	close(t.changed)
	t.changed = make(chan struct{})
	return t.err
}

// fail ends the twin. All waiting goroutines get the error.
func (t *twin) fail(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err == nil {
		t.err = err
	}
	close(t.changed)
	t.changed = make(chan struct{})
}

func (t *twin) applyMessage(frames [][]byte) error {
	if len(frames) != 3 || len(frames[1]) != 8 {
		return fmt.Errorf("a message of %d frames", len(frames))
	}
	if seq := binary.BigEndian.Uint64(frames[1]); seq != uint64(len(t.messages)) {
		return fmt.Errorf("the twin was sent message %d after %d messages", seq, len(t.messages))
	}
	var batch struct {
		_msgpack struct{} `msgpack:",as_array"`
		Time     float64
		Events   []wireEvent
		Rank     int
	}
	if err := msgpack.Unmarshal(frames[2], &batch); err != nil {
		return fmt.Errorf("message %d: %w", len(t.messages), err)
	}
	m := message{before: t.version}
	for i := range batch.Events {
		e := &batch.Events[i]
		if err := t.applyEvent(e); err != nil {
			return fmt.Errorf("message %d, event %d: %w", len(t.messages), i, err)
		}
		t.events = append(t.events, t.version)
		if e.Type == "BlockRemoved" {
			m.removed += len(e.Names)
		}
	}
	m.cleared = len(batch.Events) > 0 && batch.Events[0].Type == "AllBlocksCleared"
	t.messages = append(t.messages, m)
	return nil
}

// wireEvent has the used fields of vLLM's events.
type wireEvent struct {
	Type   string  `msgpack:"type"`
	Names  []any   `msgpack:"block_hashes"`
	Parent any     `msgpack:"parent_block_hash"`
	Tokens []int64 `msgpack:"token_ids"`
	Extra  [][]any `msgpack:"extra_keys"`
	Group  int     `msgpack:"group_idx"`
	Kind   string  `msgpack:"kv_cache_spec_kind"`
	Window int     `msgpack:"kv_cache_spec_sliding_window"`
}

func (t *twin) applyEvent(e *wireEvent) error {
	switch e.Type {
	case "BlockStored":
		return t.stored(e)
	case "BlockRemoved":
		g := t.groups[e.Group]
		for _, name := range e.Names {
			if g == nil || g.copies(text(name)) == 0 {
				return fmt.Errorf("removes the missing block %v of group %d", name, e.Group)
			}
			t.change(g, text(name), g.copies(text(name))-1)
		}
		return nil
	case "AllBlocksCleared":
		t.version++
		for _, g := range t.groups {
			for name := range g.held {
				if g.copies(name) > 0 {
					g.held[name] = append(g.held[name], change{t.version, 0})
				}
			}
		}
		return nil
	default:
		return fmt.Errorf("an event of type %q", e.Type)
	}
}

func (t *twin) stored(e *wireEvent) error {
	g := t.groups[e.Group]
	if g == nil {
		g = &group{held: map[string][]change{}}
		t.groups[e.Group] = g
		switch e.Kind {
		case "full_attention":
		case "sliding_window":
			g.window = e.Window
		default:
			return fmt.Errorf("a group of kind %q", e.Kind)
		}
	}
	if g.window == 0 { // a window group's event may omit blocks of the event's tokens
		if len(e.Tokens) != len(e.Names)*t.blockSize || e.Extra != nil && len(e.Extra) != len(e.Names) {
			return fmt.Errorf("%d blocks, %d tokens, extra keys of %d blocks", len(e.Names), len(e.Tokens),
				len(e.Extra))
		}
		parent := text(e.Parent)
		for i, name := range e.Names {
			var extra []any
			if e.Extra != nil {
				extra = e.Extra[i]
			}
			at := place{parent, content(e.Tokens[i*t.blockSize:(i+1)*t.blockSize], extra)}
			parent = text(name)
			if known, ok := t.names[at]; ok && known != parent {
				return fmt.Errorf("block %s has another name: %s", known, parent)
			}
			t.names[at] = parent
		}
	}
	for _, name := range e.Names {
		t.change(g, text(name), g.copies(text(name))+1)
	}
	return nil
}

func (t *twin) change(g *group, name string, copies int) {
	t.version++
	g.held[name] = append(g.held[name], change{t.version, copies})
}

// text is a name as a key. There is no name before the first block's.
func text(name any) string {
	if name == nil {
		return ""
	}
	return fmt.Sprint(name)
}

func content(tokens []int64, extra []any) string { return fmt.Sprint(tokens, extra) }

// namesOf returns the engine's names of a prompt's whole blocks, as far as ever announced.
func (t *twin) namesOf(p prompt) (names []string) {
	parent := ""
	for i := 0; (i+1)*t.blockSize <= len(p.tokens); i++ {
		tokens := make([]int64, t.blockSize)
		for j := range tokens {
			tokens[j] = int64(p.tokens[i*t.blockSize+j])
		}
		var extra []any
		if p.lora != "" {
			extra = append(extra, p.lora)
		}
		if p.salt != "" && i == 0 {
			extra = append(extra, p.salt)
		}
		name, ok := t.names[place{parent, content(tokens, extra)}]
		if !ok {
			break
		}
		names, parent = append(names, name), name
	}
	return names
}

// usable returns the number of leading blocks that the engine could reuse at a version: the longest prefix for which
// every full-attention group holds all blocks, and every window group holds the blocks in the last window.
func (t *twin) usable(names []string, version int) int {
	for n := t.fullDepth(names, version); n > 0; n-- {
		if t.windowsHold(names[:n], version) {
			return n
		}
	}
	return 0
}

func (t *twin) fullDepth(names []string, version int) int {
	for i, name := range names {
		for _, g := range t.groups {
			if g.window == 0 && !g.holds(name, version) {
				return i
			}
		}
	}
	return len(names)
}

func (t *twin) windowsHold(names []string, version int) bool {
	for _, g := range t.groups {
		if g.window == 0 {
			continue
		}
		need := (g.window - 1 + t.blockSize - 1) / t.blockSize
		for _, name := range names[max(0, len(names)-need):] {
			if !g.holds(name, version) {
				return false
			}
		}
	}
	return true
}

// now returns the present version, and the numbers of messages and events.
func (t *twin) now() (version, messages, events int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.version, len(t.messages), len(t.events)
}

// reusable returns the number of a prompt's blocks that the engine would reuse by its announcements.
func (t *twin) reusable(p prompt) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.usable(t.namesOf(p), t.version)
}

// fullyHeld returns the number of a prompt's leading blocks in full attention: the reusable blocks without the effect
// of windows.
func (t *twin) fullyHeld(p prompt) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.fullDepth(t.namesOf(p), t.version)
}

// fullBlocks is how many different blocks of full attention the engine holds.
func (t *twin) fullBlocks() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, g := range t.groups {
		for name := range g.held {
			if g.window == 0 && g.copies(name) > 0 {
				n++
			}
		}
	}
	return n
}

// storedFrom returns the engine's names of the blocks that were stored from a version on, in order.
func (t *twin) storedFrom(version int) (names []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	at := map[string]int{}
	for _, g := range t.groups {
		for name, changes := range g.held {
			copies := 0
			for _, c := range changes {
				if c.version > version && c.copies > copies {
					at[name] = max(at[name], c.version)
				}
				copies = c.copies
			}
		}
	}
	names = slices.Collect(maps.Keys(at))
	slices.SortFunc(names, func(a, b string) int { return at[a] - at[b] })
	return names
}

// everUsable reports whether the engine would have reused the given number of a prompt's blocks at some version in a
// range.
func (t *twin) everUsable(p prompt, from, to, want int) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	names := t.namesOf(p)
	if t.usable(names, from) == want {
		return true
	}
	for _, g := range t.groups { // the result changes only with the prompt's own blocks
		for _, name := range names {
			changes := g.held[name]
			for _, c := range changes[sort.Search(len(changes), func(i int) bool { return changes[i].version > from }):] {
				if c.version > to {
					break
				}
				if t.usable(names, c.version) == want {
					return true
				}
			}
		}
	}
	return false
}

// usableAtStep reports whether the engine would have reused the given number of a request's blocks within a step
// between two versions that stored the first block without reuse. Such a step is the step of the look-up, unless the
// step had no room for a whole block.
func (t *twin) usableAtStep(r request, from, to, reused int) bool {
	t.mu.Lock()
	names, reusable := t.namesOf(r.prompt), t.namesOf(r.prompt.reusable())
	defer t.mu.Unlock()
	if reused >= len(names) {
		return false
	}
	for _, g := range t.groups {
		before := 0
		for _, c := range g.held[names[reused]] {
			stored := g.window == 0 && c.copies > before && from < c.version && c.version <= to
			before = c.copies
			if !stored {
				continue
			}
			after := sort.Search(len(t.messages), func(i int) bool { return t.messages[i].before >= c.version })
			for v := max(from, t.messages[after-1].before); v < c.version; v++ {
				if t.usable(reusable, v) == reused {
					return true
				}
			}
		}
	}
	return false
}

// describe lists the copies of a prompt's blocks in every group.
func (t *twin) describe(p prompt) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var b strings.Builder
	for i, name := range t.namesOf(p) {
		fmt.Fprintf(&b, "block %d, %s:", i, name)
		for _, at := range slices.Sorted(maps.Keys(t.groups)) {
			fmt.Fprintf(&b, " group %d %d", at, t.groups[at].copies(name))
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// versionAfter returns the version a number of messages after the message of a version.
func (t *twin) versionAfter(version, messages int) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	next := sort.Search(len(t.messages), func(i int) bool { return t.messages[i].before >= version }) + messages
	if next >= len(t.messages) {
		return t.version
	}
	return t.messages[next].before
}

// groupCount is how many groups the engine has announced blocks of.
func (t *twin) groupCount() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.groups)
}

// versionAt is the version after so many events.
func (t *twin) versionAt(events int) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if events == 0 {
		return 0
	}
	return t.events[events-1]
}

// messagesFrom are the messages from a number on.
func (t *twin) messagesFrom(number int) []message {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.messages[number:])
}

// holdsAll reports whether a full-attention group holds all whole blocks of a prompt.
func (t *twin) holdsAll(p prompt) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	names := t.namesOf(p)
	return len(names) == len(p.tokens)/t.blockSize && t.fullDepth(names, t.version) == len(names)
}

// wait waits for a condition that only messages can change.
func (t *twin) wait(ctx context.Context, condition func() bool) error {
	for {
		t.mu.Lock()
		changed, err := t.changed, t.err
		t.mu.Unlock()
		if err != nil {
			return err
		}
		if condition() {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return errors.Join(errors.New("the engine has not announced the expected events"), ctx.Err())
		}
	}
}

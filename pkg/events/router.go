package events

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// RouterEvent is one of NVIDIA Dynamo's router events (ai-dynamo/dynamo › lib/kv-router, protocols). Dynamo's workers
// publish router events. Events of any engine can be converted to this form.
type RouterEvent struct {
	Key   RankKey
	ID    uint64 // consecutive within a rank
	Event Event  // of kind 0 if it is skipped; see Skipped

	// Skipped is the reason why a well-formed event has no effect: an unknown residency domain, tier or kind of event.
	Skipped string

	// Groups are stored events without local hashes that follow a cleared event. They list the kinds of the rank's
	// KV-cache groups, and the blocks of groups outside the prefix.
	Groups []Event
}

var routerTiers = map[string]Tier{"device": Device, "host_pinned": Host, "disk": Disk, "external": External}

func routerTierName(t Tier) string {
	for name, tier := range routerTiers {
		if tier == t {
			return name
		}
	}
	return "device"
}

// routerGroup is the JSON of one of [RouterEvent].Groups, with vLLM's names.
type routerGroup struct {
	Group  GroupIndex   `json:"group_idx"`
	Kind   string       `json:"kv_cache_spec_kind"`
	Window uint32       `json:"window,omitempty"`
	Drops  bool         `json:"eagle,omitempty"`
	Tier   string       `json:"storage_tier,omitempty"` // default device
	Blocks []routerHash `json:"block_hashes,omitempty"`
}

func appendRouterGroups(dst []byte, groups []Event) []byte {
	var list []routerGroup
	for i := range groups {
		e := &groups[i]
		g := routerGroup{e.Group, e.Attention.String(), e.Window, e.Drops, routerTierName(e.Tier), nil}
		for _, b := range e.Blocks {
			g.Blocks = append(g.Blocks, routerHash(b))
		}
		list = append(list, g)
	}
	text, _ := json.Marshal(list) // numbers and strings have no error
	return append(append(dst, `,"kv_groups":`...), text...)
}

func routerGroupsOf(list []routerGroup) (groups []Event, err error) {
	for _, g := range list {
		e := Event{Kind: Stored, Tier: Device, Group: g.Group, Attention: attentionOf(g.Kind), Window: g.Window,
			Drops: g.Drops}
		if tier, known := routerTiers[g.Tier]; known {
			e.Tier = tier
		} else if g.Tier != "" {
			return nil, fmt.Errorf("kv_groups: storage_tier %.40q is unknown", g.Tier)
		}
		for _, b := range g.Blocks {
			e.Blocks = append(e.Blocks, BlockHash(b))
		}
		groups = append(groups, e)
	}
	return groups, nil
}

// AppendRouterEvent appends an event as one line of JSON, with the newline. groups are allowed with a cleared event.
func AppendRouterEvent(dst []byte, key RankKey, id EventID, e *Event, groups ...Event) []byte {
	group := func() {
		if e.Group > 0 {
			dst = append(strconv.AppendUint(append(dst, `"group_idx":`...), uint64(e.Group), 10), ',')
		}
	}
	dst = append(dst, `{"worker_id":`...)
	if v, err := strconv.ParseUint(string(key.Instance), 10, 64); err == nil &&
		strconv.FormatUint(v, 10) == string(key.Instance) {
		dst = append(dst, key.Instance...)
	} else {
		dst = appendJSONString(dst, string(key.Instance))
	}
	if e.Kind != Cleared {
		dst = append(append(append(dst, `,"storage_tier":"`...), routerTierName(e.Tier)...), '"')
	}
	dst = strconv.AppendUint(append(dst, `,"event":{"event_id":`...), uint64(id), 10)
	dst = append(dst, `,"data":`...)
	switch e.Kind {
	case Stored:
		dst = append(dst, `{"stored":{`...)
		group()
		dst = append(dst, `"parent_hash":`...)
		if e.HasParent {
			dst = strconv.AppendUint(dst, uint64(e.Parent), 10)
		} else {
			dst = append(dst, "null"...)
		}
		dst = append(dst, `,"start_position":null`...)
		if e.Lookahead > 0 {
			dst = strconv.AppendUint(append(dst, `,"lookahead":`...), uint64(e.Lookahead), 10)
		}
		dst = append(dst, `,"blocks":[`...)
		for i, b := range e.Blocks {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = strconv.AppendUint(append(dst, `{"block_hash":`...), uint64(b), 10)
			dst = strconv.AppendUint(append(dst, `,"tokens_hash":`...), uint64(e.Locals[i]), 10)
			dst = append(dst, `,"mm_extra_info":null}`...)
		}
		dst = append(dst, "]}}"...)
	case Removed:
		dst = append(dst, `{"removed":{`...)
		group()
		dst = append(dst, `"block_hashes":[`...)
		for i, b := range e.Blocks {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = strconv.AppendUint(dst, uint64(b), 10)
		}
		dst = append(dst, "]}}"...)
	default:
		dst = append(dst, `"cleared"`...)
	}
	dst = append(strconv.AppendUint(append(dst, `,"dp_rank":`...), uint64(key.Rank), 10), '}')
	if e.Kind == Cleared && len(groups) > 0 {
		dst = appendRouterGroups(dst, groups)
	}
	return append(dst, "}\n"...)
}

// routerHash is an unsigned number, or a signed number with the same bits.
type routerHash uint64

func (h *routerHash) UnmarshalJSON(text []byte) error {
	if v, err := strconv.ParseUint(string(text), 10, 64); err == nil {
		*h = routerHash(v)
		return nil
	}
	v, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil {
		return fmt.Errorf("%.40s is not a 64-bit number", text)
	}
	*h = routerHash(v)
	return nil
}

// routerJSON is a router event's JSON, without unused fields.
type routerJSON struct {
	Worker json.RawMessage `json:"worker_id"`
	Tier   *string         `json:"storage_tier"`
	Domain json.RawMessage `json:"residency_domain"`
	// the session of the request that stored the blocks; any other type than text counts as absent
	Session json.RawMessage `json:"session_id"`
	Event   *struct {
		ID   uint64          `json:"event_id"`
		Data json.RawMessage `json:"data"`
		Rank uint32          `json:"dp_rank"`
	} `json:"event"`
	Groups []routerGroup `json:"kv_groups"` // an extension of kvatlas: see RouterEvent.Groups
}

type routerStored struct {
	Group     GroupIndex  `json:"group_idx"` // an extension, default 0
	Parent    *routerHash `json:"parent_hash"`
	Lookahead uint16      `json:"lookahead"` // an extension: see Event.Lookahead
	Blocks    []struct {
		Block  *routerHash `json:"block_hash"`
		Tokens *routerHash `json:"tokens_hash"`
	} `json:"blocks"`
}

type routerRemoved struct {
	Group  GroupIndex   `json:"group_idx"` // an extension, default 0
	Blocks []routerHash `json:"block_hashes"`
}

// ReadRouterEvent reads one router event of any release of Dynamo from JSON. Missing fields have their defaults;
// unknown fields are ignored. Some fields are extensions, which Dynamo ignores: "lookahead" of a stored event
// ([Event].Lookahead), "group_idx" of a stored or removed event, and "kv_groups" of a cleared event.
func ReadRouterEvent(line []byte) (RouterEvent, error) { return readRouterEvent(line, true) }

// readRouterEvent is ReadRouterEvent. Unless strict, an event with an unknown word as data is skipped.
func readRouterEvent(line []byte, strict bool) (RouterEvent, error) {
	var e routerJSON
	if err := strictjson.Unmarshal(line, &e); err != nil {
		return RouterEvent{}, err
	}
	if e.Event == nil || e.Worker == nil || e.Event.Data == nil {
		return RouterEvent{}, errors.New("worker_id, event or its data is missing")
	}
	out := RouterEvent{ID: e.Event.ID, Key: RankKey{Rank: Rank(e.Event.Rank)}}
	var err error
	if out.Key.Instance, err = routerWorker(e.Worker); err != nil {
		return out, err
	}
	switch string(e.Domain) {
	case "", `"worker"`, `"cache_owner"`:
	default:
		out.Skipped = skippedDomain
		return out, nil
	}
	tier := Device
	if e.Tier != nil {
		known := false
		if tier, known = routerTiers[*e.Tier]; !known {
			out.Skipped = skippedTier
			return out, nil
		}
	}
	if !strict && e.Event.Data[0] == '"' && string(e.Event.Data) != `"cleared"` {
		out.Skipped = skippedKind
		return out, nil
	}
	if string(e.Event.Data) == `"cleared"` {
		out.Event = Event{Kind: Cleared, Tier: AllTiers, Reason: ReasonEngine}
		out.Groups, err = routerGroupsOf(e.Groups)
		return out, err
	}
	var kinds map[string]json.RawMessage
	if err := strictjson.Unmarshal(e.Event.Data, &kinds); err != nil || len(kinds) != 1 {
		return out, errors.New(`data is neither "cleared" nor an object of one kind of event`)
	}
	switch {
	case kinds["stored"] != nil:
		out.Event, err = routerStoredOf(kinds["stored"], tier)
		out.Event.Session = routerSession(e.Session)
	case kinds["removed"] != nil:
		var r routerRemoved
		if err = strictjson.Unmarshal(kinds["removed"], &r); err == nil && len(r.Blocks) == 0 {
			err = errors.New("removed without block_hashes")
		}
		out.Event = Event{Kind: Removed, Tier: tier, Group: r.Group}
		for _, b := range r.Blocks {
			out.Event.Blocks = append(out.Event.Blocks, BlockHash(b))
		}
	default:
		out.Skipped = skippedKind
	}
	return out, err
}

const (
	skippedDomain = "residency domain"
	skippedTier   = "storage tier"
	skippedKind   = "kind of event"
)

// routerWorker returns a worker's id: a string, or the digits of a number.
func routerWorker(text json.RawMessage) (WorkerID, error) {
	var name string
	if text[0] == '"' {
		err := strictjson.Unmarshal(text, &name)
		return WorkerID(name), err
	}
	var id routerHash
	if err := id.UnmarshalJSON(text); err != nil {
		return "", fmt.Errorf("worker_id: %w", err)
	}
	return WorkerID(text), nil
}

// routerSession returns the hash of an event's session_id, or 0 without a usable one.
func routerSession(text json.RawMessage) SessionHash {
	var id string
	if len(text) == 0 || text[0] != '"' || strictjson.Unmarshal(text, &id) != nil || len(id) > maxSession {
		return 0
	}
	return HashSession(id)
}

func routerStoredOf(text json.RawMessage, tier Tier) (Event, error) {
	var s routerStored
	e := Event{Kind: Stored, Tier: tier}
	if err := strictjson.Unmarshal(text, &s); err != nil {
		return e, err
	}
	e.Lookahead, e.Group = uint32(s.Lookahead), s.Group
	if s.Parent != nil {
		e.HasParent, e.Parent = true, BlockHash(*s.Parent)
	}
	for i, b := range s.Blocks {
		if b.Block == nil || b.Tokens == nil {
			return e, fmt.Errorf("block %d lacks block_hash or tokens_hash", i)
		}
		e.Blocks = append(e.Blocks, BlockHash(*b.Block))
		e.Locals = append(e.Locals, LocalHash(*b.Tokens))
	}
	if len(e.Blocks) == 0 {
		return e, errors.New("stored without blocks")
	}
	return e, nil
}

// Events returns the event and its groups in sizes for a batch, and none for a skipped event.
func (e *RouterEvent) Events() (all []Event) {
	if e.Event.Kind != 0 {
		all = e.Event.Cut()
	}
	for i := range e.Groups {
		all = append(all, e.Groups[i].Cut()...)
	}
	return all
}

// Cut splits the event into events of at most [MaxBlocksPerEvent] blocks, which a batch accepts.
func (e Event) Cut() (cut []Event) {
	for len(e.Blocks) > MaxBlocksPerEvent {
		head := e
		head.Blocks = e.Blocks[:MaxBlocksPerEvent]
		if len(e.Locals) > 0 {
			head.Locals = e.Locals[:MaxBlocksPerEvent]
			e.Locals = e.Locals[MaxBlocksPerEvent:]
			e.HasParent, e.Parent = true, head.Blocks[MaxBlocksPerEvent-1]
		}
		e.Blocks = e.Blocks[MaxBlocksPerEvent:]
		cut = append(cut, head)
	}
	return append(cut, e)
}

// ReadRouterEnvelope reads a message of a Dynamo worker over NATS (ai-dynamo/dynamo › lib/runtime, event plane). It is
// a MessagePack map EventEnvelope. The payload is a router event or an array of router events, as maps with the names
// of the JSON form. In JetStream mode the message is one router event as JSON. yield receives each event, in order.
// After an error, the rest of the message is not read.
func ReadRouterEnvelope(data []byte, yield func(RouterEvent)) error {
	if len(data) > maxPayload {
		return malformed(0, "a Dynamo message of %d bytes: at most %d", len(data), maxPayload)
	}
	if trimmed := bytes.TrimLeft(data, " \t\r\n"); len(trimmed) > 0 && trimmed[0] == '{' {
		e, err := ReadRouterEvent(data)
		if err == nil {
			yield(e)
		}
		return err
	}
	return eachOfEnvelope(data, "router event", func(line []byte) error {
		e, err := readRouterEvent(line, false)
		if err == nil {
			yield(e)
		}
		return err
	})
}

// RouterAnswer is the answer of a Dynamo worker's local indexer to a request for the events from an id on
// (ai-dynamo/dynamo › lib/kv-router, WorkerKvQueryResponse).
type RouterAnswer struct {
	// Whole is true if the worker no longer has the requested events. Events then contain all blocks of the rank, and
	// their ids have no meaning. Otherwise Events are the requested events, in order; none if the rank has not reached the
	// id.
	Whole  bool
	Events []RouterEvent
	Last   uint64 // the id of the newest event
}

// ReadRouterAnswer reads an answer from MessagePack. If the worker refuses, the error contains its reason.
func ReadRouterAnswer(data []byte) (a RouterAnswer, err error) {
	r := &msgp.Reader{Data: data}
	kinds := 0
	var said error // the worker's reason for its refusal
	err = each(r, func(key string) bool {
		if key != "data" {
			return r.Skip()
		}
		return each(r, func(kind string) bool {
			kinds++
			if kind == "Events" || kind == "TreeDump" || kind == "TooNew" {
				a.Whole = kind == "TreeDump"
				said = cmp.Or(said, a.read(r, kind == "TooNew"))
			} else {
				begin := r.At
				r.Skip()
				text := appendJSON(nil, &msgp.Reader{Data: data[:r.At], At: begin}, maxRouterNesting)
				said = fmt.Errorf("the worker answers %.40q: %.300s", kind, text)
			}
			return !r.Broken
		}) == nil
	})
	switch {
	case said != nil && !r.Broken:
		return RouterAnswer{}, said
	case err != nil || r.Broken || r.Left() > 0:
		return RouterAnswer{}, malformed(r.At, "an answer that is truncated, or not of maps with names")
	case kinds != 1:
		return RouterAnswer{}, fmt.Errorf("the worker's answer has %d kinds, and exactly one is expected", kinds)
	}
	return a, nil
}

// read reads an answer one event at a time, since the JSON of the events takes more memory than the events.
func (a *RouterAnswer) read(r *msgp.Reader, tooNew bool) (said error) {
	known := false
	if err := each(r, func(key string) bool {
		switch {
		case key == "last_event_id" && !tooNew, key == "newest_available" && tooNew:
			a.Last, known = r.Uint(math.MaxUint64)
			return known
		case key != "events":
			return r.Skip()
		case r.Null():
			return true
		}
		n, ok := r.Array()
		var line []byte
		for i := 0; i < n && ok && said == nil; i++ {
			var e RouterEvent
			line = appendJSON(line[:0], r, maxRouterNesting)
			if ok = !r.Broken; !ok {
				break
			}
			if e, said = readRouterEvent(line, false); said != nil {
				said = fmt.Errorf("event %d of %d: %w", i, n, said)
				r.SkipN(n - i - 1)
			}
			a.Events = append(a.Events, e)
		}
		return ok
	}); err != nil {
		return err
	}
	if !known && said == nil {
		said = errors.New("the worker's answer lacks the id of the newest event")
	}
	return said
}

// Bounds of one router event. A prompt of a million tokens in blocks of 16 has 65,536 blocks in 7 MB of JSON.
const (
	maxRouterEvent  = 16 << 20 // bytes of JSON
	maxRouterString = 1 << 20  // bytes
)

// maxRouterNesting bounds the depth of nested values in a router event.
const maxRouterNesting = 64

// appendJSON appends the next value as JSON with the same names. A value without a JSON form becomes null. A value
// beyond the bounds of a router event breaks the reader.
func appendJSON(dst []byte, r *msgp.Reader, depth int) []byte {
	if depth == 0 || len(dst) > maxRouterEvent {
		r.Broken = true
	}
	switch form := r.Next(); form {
	case msgp.Bool:
		v, _ := r.Bool()
		return strconv.AppendBool(dst, v)
	case msgp.Int:
		bits, negative, _ := r.Int()
		if negative {
			return strconv.AppendInt(dst, int64(bits), 10)
		}
		return strconv.AppendUint(dst, bits, 10)
	case msgp.Str:
		text, _ := r.Str()
		if len(text) > maxRouterString {
			r.Broken = true
			return dst
		}
		return appendJSONString(dst, string(text))
	case msgp.Array:
		n, _ := r.Array()
		r.Broken = r.Broken || n > maxEventTokens
		dst = append(dst, '[')
		for i := 0; i < n && !r.Broken; i++ {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = appendJSON(dst, r, depth-1)
		}
		return append(dst, ']')
	case msgp.Map:
		n, _ := r.Map()
		dst = append(dst, '{')
		for i := 0; i < n && !r.Broken; i++ {
			if i > 0 {
				dst = append(dst, ',')
			}
			name, ok := r.Str()
			r.Broken = r.Broken || !ok
			dst = append(appendJSONString(dst, string(name)), ':')
			dst = appendJSON(dst, r, depth-1)
		}
		return append(dst, '}')
	}
	r.Broken = !r.Skip()
	return append(dst, "null"...)
}

func appendJSONString(dst []byte, s string) []byte {
	text, _ := json.Marshal(s) // a string has no error
	return append(dst, text...)
}

// each calls do for each key of a map. do must read the value.
func each(r *msgp.Reader, do func(key string) bool) error {
	if fault := r.EachKey(do); fault != "" {
		return malformed(r.At, "%s", fault)
	}
	return nil
}

func byteArray(r *msgp.Reader) ([]byte, bool) {
	n, ok := r.Array()
	if !ok {
		return nil, false
	}
	out := make([]byte, 0, n)
	for range n {
		v, ok := r.Uint(math.MaxUint8)
		if !ok {
			return nil, false
		}
		out = append(out, byte(v))
	}
	return out, true
}

package events

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/kvatlas/kvatlas/internal/msgp"
)

// RouterEvent is one of NVIDIA Dynamo's router events (ai-dynamo/dynamo › lib/kv-router, protocols): what an engine
// with any event stream of its own can be told in, and what Dynamo's workers publish.
type RouterEvent struct {
	Key   RankKey
	ID    uint64 // consecutive within a rank
	Event Event  // of kind 0 if it is to be passed over; see Skipped

	// Skipped says why nothing follows from the event, which is well-formed all the same: a residency domain, a tier or
	// a kind of event that we do not know.
	Skipped string

	// Groups are stored events without local hashes that follow a cleared event: what the rank's KV-cache groups serve,
	// and which blocks those hold that are no part of a prefix.
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

// AppendRouterEvent appends an event as one line of JSON, with its end. groups go with a cleared event.
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
		name, _ := json.Marshal(string(key.Instance)) // a string has no error
		dst = append(dst, name...)
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

// routerHash is an unsigned number, or a signed one of the same bits.
type routerHash uint64

func (h *routerHash) UnmarshalJSON(text []byte) error {
	if v, err := strconv.ParseUint(string(text), 10, 64); err == nil {
		*h = routerHash(v)
		return nil
	}
	v, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil {
		return fmt.Errorf("%.40s is no 64-bit number", text)
	}
	*h = routerHash(v)
	return nil
}

// routerJSON is a router event's JSON. What we have no use for is not listed.
type routerJSON struct {
	Worker json.RawMessage `json:"worker_id"`
	Tier   *string         `json:"storage_tier"`
	Domain json.RawMessage `json:"residency_domain"`
	Event  *struct {
		ID   uint64          `json:"event_id"`
		Data json.RawMessage `json:"data"`
		Rank uint32          `json:"dp_rank"`
	} `json:"event"`
	Groups []routerGroup `json:"kv_groups"` // ours: see RouterEvent.Groups
}

type routerStored struct {
	Group     GroupIndex  `json:"group_idx"` // ours: 0 if it is not there
	Parent    *routerHash `json:"parent_hash"`
	Lookahead uint16      `json:"lookahead"` // ours: see Event.Lookahead
	Blocks    []struct {
		Block  *routerHash `json:"block_hash"`
		Tokens *routerHash `json:"tokens_hash"`
	} `json:"blocks"`
}

type routerRemoved struct {
	Group  GroupIndex   `json:"group_idx"` // ours
	Blocks []routerHash `json:"block_hashes"`
}

// ReadRouterEvent reads one router event from JSON, as any release of Dynamo wrote it: fields that are missing have
// their defaults, unknown ones are ignored. Some fields are not Dynamo's, which ignores them: "lookahead" of a stored
// event, for [Event].Lookahead; "group_idx" of a stored or removed event; and "kv_groups" beside a cleared one.
func ReadRouterEvent(line []byte) (RouterEvent, error) {
	var e routerJSON
	if err := json.Unmarshal(line, &e); err != nil {
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
	if bytes.Equal(e.Event.Data, []byte(`"cleared"`)) {
		out.Event = Event{Kind: Cleared, Tier: AllTiers, Reason: ReasonEngine}
		out.Groups, err = routerGroupsOf(e.Groups)
		return out, err
	}
	var kinds map[string]json.RawMessage
	if err := json.Unmarshal(e.Event.Data, &kinds); err != nil || len(kinds) != 1 {
		return out, errors.New(`data is neither "cleared" nor an object of one kind of event`)
	}
	switch {
	case kinds["stored"] != nil:
		out.Event, err = routerStoredOf(kinds["stored"], tier)
	case kinds["removed"] != nil:
		var r routerRemoved
		if err = json.Unmarshal(kinds["removed"], &r); err == nil && len(r.Blocks) == 0 {
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

// routerWorker is a number's digits, or a string.
func routerWorker(text json.RawMessage) (WorkerID, error) {
	var name string
	if text[0] == '"' {
		err := json.Unmarshal(text, &name)
		return WorkerID(name), err
	}
	var id routerHash
	if err := id.UnmarshalJSON(text); err != nil {
		return "", fmt.Errorf("worker_id: %w", err)
	}
	return WorkerID(text), nil
}

func routerStoredOf(text json.RawMessage, tier Tier) (Event, error) {
	var s routerStored
	e := Event{Kind: Stored, Tier: tier}
	if err := json.Unmarshal(text, &s); err != nil {
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

// Events are the event and its groups, cut as a batch needs them; none of an event that is passed over.
func (e *RouterEvent) Events() (all []Event) {
	if e.Event.Kind != 0 {
		all = e.Event.Cut()
	}
	for i := range e.Groups {
		all = append(all, e.Groups[i].Cut()...)
	}
	return all
}

// Cut is the event as events of at most [MaxBlocksPerEvent] blocks each, as a batch needs them.
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

// ReadRouterEnvelope reads what a Dynamo worker publishes over NATS (ai-dynamo/dynamo › lib/runtime, event plane): a
// MessagePack map EventEnvelope whose payload is one router event or an array of them, as maps with the names that JSON
// has; or, in JetStream mode, one router event as JSON. yield is called with each event, in order. An error says that
// the message as a whole, or what follows the events that were yielded, cannot be read.
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
	r := &msgp.Reader{Data: data}
	payload, found := data, false
	if err := each(r, func(key string) bool {
		if key != "payload" {
			return r.Skip()
		}
		at, ok := r.At, false
		if payload, ok = r.Bin(); !ok { // an array of bytes, as serde writes without its bytes type
			r.At = at
			payload, ok = byteArray(r)
		}
		found = ok
		return ok
	}); err != nil {
		return err
	}
	if !found { // no envelope
		payload = data
	}
	r = &msgp.Reader{Data: payload}
	n, ok := r.Array()
	if !ok {
		n = 1
	}
	for i := range n {
		e, err := routerEvent(r)
		if err != nil {
			return fmt.Errorf("router event %d of %d: %w", i, n, err)
		}
		yield(e)
	}
	return nil
}

// each calls do at each value of a map, which it must read.
func each(r *msgp.Reader, do func(key string) bool) error {
	n, ok := r.Map()
	if !ok {
		return malformed(r.At, "no map")
	}
	for range n {
		key, ok := r.Str()
		if !ok || !do(string(key)) || r.Broken {
			return malformed(r.At, "no value under %.40q", key)
		}
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

func routerEvent(r *msgp.Reader) (RouterEvent, error) {
	var out RouterEvent
	tier, worker, inner := Device, false, false
	err := each(r, func(key string) bool {
		switch key {
		case "worker_id":
			worker = true
			if s, ok := r.Str(); ok {
				out.Key.Instance = WorkerID(s)
				return true
			}
			bits, negative, ok := r.Int()
			if out.Key.Instance = WorkerID(strconv.FormatUint(bits, 10)); negative {
				out.Key.Instance = WorkerID(strconv.FormatInt(int64(bits), 10))
			}
			return ok
		case "storage_tier":
			name, ok := r.Str()
			known := false
			if tier, known = routerTiers[string(name)]; !known && out.Skipped == "" {
				out.Skipped = skippedTier
			}
			return ok || r.Skip()
		case "residency_domain":
			name, ok := r.Str()
			if string(name) != "worker" && string(name) != "cache_owner" {
				out.Skipped = skippedDomain
			}
			return ok || r.Skip()
		case "event":
			inner = true
			return routerKvEvent(r, &out) == nil
		}
		return r.Skip()
	})
	switch {
	case err != nil:
		return out, err
	case !worker || !inner || out.Event.Kind == 0 && out.Skipped == "":
		return out, malformed(r.At, "worker_id, event or its data is missing")
	case out.Skipped != "":
		out.Event = Event{}
	case out.Event.Kind != Cleared:
		out.Event.Tier = tier
	}
	return out, nil
}

func routerKvEvent(r *msgp.Reader, out *RouterEvent) error {
	return each(r, func(key string) (ok bool) {
		switch key {
		case "event_id":
			out.ID, ok = r.Uint(math.MaxUint64)
			return ok
		case "dp_rank":
			v, ok := r.Uint(math.MaxUint32)
			out.Key.Rank = Rank(v)
			return ok
		case "data":
			if name, ok := r.Str(); ok {
				if string(name) == "cleared" {
					out.Event = Event{Kind: Cleared, Tier: AllTiers, Reason: ReasonEngine}
				} else {
					out.Skipped = skippedKind
				}
				return true
			}
			return each(r, func(kind string) bool {
				switch kind {
				case "stored":
					return readRouterStored(r, &out.Event)
				case "removed":
					out.Event = Event{Kind: Removed}
					return each(r, func(key string) bool {
						if key == "group_idx" {
							return readGroupIndex(r, &out.Event)
						} else if key != "block_hashes" {
							return r.Skip()
						}
						n, ok := r.Array()
						for ; ok && n > 0; n-- {
							var v uint64
							if v, _, ok = r.Int(); ok {
								out.Event.Blocks = append(out.Event.Blocks, BlockHash(v))
							}
						}
						return ok && len(out.Event.Blocks) > 0
					}) == nil && len(out.Event.Blocks) > 0
				}
				out.Skipped = skippedKind
				return r.Skip()
			}) == nil
		}
		return r.Skip()
	})
}

func readGroupIndex(r *msgp.Reader, e *Event) bool {
	v, ok := r.Uint(math.MaxUint32)
	e.Group = GroupIndex(v)
	return ok
}

func readRouterStored(r *msgp.Reader, e *Event) bool {
	*e = Event{Kind: Stored}
	return each(r, func(key string) bool {
		switch key {
		case "parent_hash":
			if r.Null() {
				return true
			}
			v, _, ok := r.Int()
			e.HasParent, e.Parent = ok, BlockHash(v)
			return ok
		case "group_idx":
			return readGroupIndex(r, e)
		case "lookahead":
			v, ok := r.Uint(MaxBlockSize)
			e.Lookahead = uint32(v)
			return ok
		case "blocks":
			n, ok := r.Array()
			for ; ok && n > 0; n-- {
				named, hashed := false, false
				ok = each(r, func(key string) bool {
					switch key {
					case "block_hash":
						v, _, ok := r.Int()
						e.Blocks, named = append(e.Blocks, BlockHash(v)), ok && !named
						return named
					case "tokens_hash":
						v, _, ok := r.Int()
						e.Locals, hashed = append(e.Locals, LocalHash(v)), ok && !hashed
						return hashed
					}
					return r.Skip()
				}) == nil && named && hashed
			}
			return ok
		}
		return r.Skip()
	}) == nil && len(e.Blocks) > 0 && len(e.Blocks) == len(e.Locals)
}

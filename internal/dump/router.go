package dump

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Line is one RouterEvent.
type Line struct {
	Key   events.RankKey
	ID    uint64
	Event events.Event // of kind 0 if it is to be passed over; see Skipped

	// Skipped says why nothing follows from the line, which is well-formed all the same: a residency domain or an event that we do not
	// know.
	Skipped string
}

var tierNames = map[string]events.Tier{"device": events.Device, "host_pinned": events.Host, "disk": events.Disk, "external": events.External}

func tierName(t events.Tier) string {
	for name, tier := range tierNames {
		if tier == t {
			return name
		}
	}
	return "device"
}

// Append appends an event as one line, with its end.
func Append(dst []byte, key events.RankKey, id events.EventID, e *events.Event) []byte {
	dst = append(dst, `{"worker_id":`...)
	if v, err := strconv.ParseUint(string(key.Instance), 10, 64); err == nil && strconv.FormatUint(v, 10) == string(key.Instance) {
		dst = append(dst, key.Instance...)
	} else {
		name, _ := json.Marshal(string(key.Instance)) // a string has no error
		dst = append(dst, name...)
	}
	if e.Kind != events.Cleared {
		dst = append(append(append(dst, `,"storage_tier":"`...), tierName(e.Tier)...), '"')
	}
	dst = strconv.AppendUint(append(dst, `,"event":{"event_id":`...), uint64(id), 10)
	dst = append(dst, `,"data":`...)
	switch e.Kind {
	case events.Stored:
		dst = append(dst, `{"stored":{"parent_hash":`...)
		if e.HasParent {
			dst = strconv.AppendUint(dst, uint64(e.Parent), 10)
		} else {
			dst = append(dst, "null"...)
		}
		dst = append(dst, `,"start_position":null,"blocks":[`...)
		for i, b := range e.Blocks {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = strconv.AppendUint(append(dst, `{"block_hash":`...), uint64(b), 10)
			dst = strconv.AppendUint(append(dst, `,"tokens_hash":`...), uint64(e.Locals[i]), 10)
			dst = append(dst, `,"mm_extra_info":null}`...)
		}
		dst = append(dst, "]}}"...)
	case events.Removed:
		dst = append(dst, `{"removed":{"block_hashes":[`...)
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
	dst = strconv.AppendUint(append(dst, `,"dp_rank":`...), uint64(key.Rank), 10)
	return append(dst, "}}\n"...)
}

// hash is an unsigned number, or a signed one of the same bits.
type hash uint64

func (h *hash) UnmarshalJSON(text []byte) error {
	if v, err := strconv.ParseUint(string(text), 10, 64); err == nil {
		*h = hash(v)
		return nil
	}
	v, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil {
		return fmt.Errorf("%.40s is no 64-bit number", text)
	}
	*h = hash(v)
	return nil
}

// routerEvent is the JSON of a line. What we have no use for is not listed.
type routerEvent struct {
	Worker json.RawMessage `json:"worker_id"`
	Tier   *string         `json:"storage_tier"`
	Domain json.RawMessage `json:"residency_domain"`
	Event  *struct {
		ID   uint64          `json:"event_id"`
		Data json.RawMessage `json:"data"`
		Rank uint32          `json:"dp_rank"`
	} `json:"event"`
}

type stored struct {
	Parent *hash `json:"parent_hash"`
	Blocks []struct {
		Block  *hash `json:"block_hash"`
		Tokens *hash `json:"tokens_hash"`
	} `json:"blocks"`
}

type removed struct {
	Blocks []hash `json:"block_hashes"`
}

// Read takes a line apart, as any release of Dynamo wrote it: fields that are missing have their defaults, unknown ones are ignored.
func Read(line []byte) (Line, error) {
	var e routerEvent
	if err := json.Unmarshal(line, &e); err != nil {
		return Line{}, err
	}
	if e.Event == nil || e.Worker == nil || e.Event.Data == nil {
		return Line{}, errors.New("worker_id, event or its data is missing")
	}
	out := Line{ID: e.Event.ID, Key: events.RankKey{Rank: events.Rank(e.Event.Rank)}}
	var err error
	if out.Key.Instance, err = workerOf(e.Worker); err != nil {
		return out, err
	}
	switch string(e.Domain) {
	case "", `"worker"`, `"cache_owner"`:
	default:
		out.Skipped = "residency domain"
		return out, nil
	}
	tier := events.Device
	if e.Tier != nil {
		known := false
		if tier, known = tierNames[*e.Tier]; !known {
			out.Skipped = "storage tier"
			return out, nil
		}
	}
	if bytes.Equal(e.Event.Data, []byte(`"cleared"`)) {
		out.Event = events.Event{Kind: events.Cleared, Tier: events.AllTiers, Reason: events.ReasonEngine}
		return out, nil
	}
	var kinds map[string]json.RawMessage
	if err := json.Unmarshal(e.Event.Data, &kinds); err != nil || len(kinds) != 1 {
		return out, errors.New(`data is neither "cleared" nor an object of one kind of event`)
	}
	switch {
	case kinds["stored"] != nil:
		out.Event, err = storedOf(kinds["stored"], tier)
	case kinds["removed"] != nil:
		var r removed
		if err = json.Unmarshal(kinds["removed"], &r); err == nil && len(r.Blocks) == 0 {
			err = errors.New("removed without block_hashes")
		}
		out.Event = events.Event{Kind: events.Removed, Tier: tier}
		for _, b := range r.Blocks {
			out.Event.Blocks = append(out.Event.Blocks, events.BlockHash(b))
		}
	default:
		out.Skipped = "kind of event"
	}
	return out, err
}

// workerOf is a number's digits, or a string.
func workerOf(text json.RawMessage) (events.WorkerID, error) {
	var name string
	if text[0] == '"' {
		err := json.Unmarshal(text, &name)
		return events.WorkerID(name), err
	}
	var id hash
	if err := id.UnmarshalJSON(text); err != nil {
		return "", fmt.Errorf("worker_id: %w", err)
	}
	return events.WorkerID(text), nil
}

func storedOf(text json.RawMessage, tier events.Tier) (events.Event, error) {
	var s stored
	e := events.Event{Kind: events.Stored, Tier: tier}
	if err := json.Unmarshal(text, &s); err != nil {
		return e, err
	}
	if s.Parent != nil {
		e.HasParent, e.Parent = true, events.BlockHash(*s.Parent)
	}
	for i, b := range s.Blocks {
		if b.Block == nil || b.Tokens == nil {
			return e, fmt.Errorf("block %d lacks block_hash or tokens_hash", i)
		}
		e.Blocks = append(e.Blocks, events.BlockHash(*b.Block))
		e.Locals = append(e.Locals, events.LocalHash(*b.Tokens))
	}
	if len(e.Blocks) == 0 {
		return e, errors.New("stored without blocks")
	}
	return e, nil
}

package api

import (
	"github.com/kvatlas/kvatlas/pkg/events"
)

// The operations on what engines report of themselves.
const (
	OpEngineLoad  = "engine_load"  // EngineLoads → Done
	OpEngineLoads = "engine_loads" // → EngineLoads, what is known
)

// EngineLoad is how full a rank is, as its engine says, or as a router of another make counts what it has sent there.
type EngineLoad = events.EngineLoad

// EngineLoads are reports of engines: what they say, or what is known of all of them.
type EngineLoads struct {
	Loads []EngineLoad `json:"loads" msgpack:"loads"` // by worker and rank, newest first, where they are known
}

// MaxEngineLoads is how many reports one request may have.
const MaxEngineLoads = 8192

// Check refuses what says nothing. The error is an [Error].
func (l *EngineLoads) Check() error {
	if len(l.Loads) > MaxEngineLoads {
		return Errorf(CodeTooLarge, "loads has %d elements, more than %d", len(l.Loads), MaxEngineLoads)
	}
	for i := range l.Loads {
		if err := l.Loads[i].Check(); err != nil {
			return Errorf(CodeMalformed, "loads[%d]: %v", i, err)
		}
	}
	return nil
}

// ReadEngineLoads reads reports that were published, by nodes and shims of newer versions too: fields that are not
// known are ignored, and all others are read strictly. The error is an [Error].
func ReadEngineLoads(contentType string, body []byte) (*EngineLoads, error) {
	var l EngineLoads
	err := readRequest(contentType, body, IgnoreUnknown, func(r *reader) error { return readEngineLoads(r, &l) })
	if err == nil {
		err = l.Check()
	}
	return &l, err
}

// The five last fields are those of Dynamo's older ForwardPassMetrics from which nothing follows: who has such metrics
// passes them on as they are.
var (
	engineLoadsFields = []string{"loads"}
	engineLoadFields  = []string{"worker", "rank", "kv_used_blocks", "kv_active_blocks", "kv_total_blocks",
		"active_decode_blocks", "active_prefill_tokens", "age_ms", "request_active_slots", "request_total_slots",
		"num_requests_waiting", "gpu_cache_usage_perc", "gpu_prefix_cache_hit_rate"}
)

func readEngineLoads(r *reader, l *EngineLoads) error {
	return r.fields("the request", engineLoadsFields, func(field string) error {
		l.Loads = []EngineLoad{}
		return r.each(field, func() error {
			if len(l.Loads) == MaxEngineLoads {
				return Errorf(CodeTooLarge, "loads has more than %d elements", MaxEngineLoads)
			}
			l.Loads = append(l.Loads, EngineLoad{})
			return readEngineLoad(r, &l.Loads[len(l.Loads)-1])
		})
	})
}

func readEngineLoad(r *reader, l *EngineLoad) error {
	count := func(field string, to **uint64) error {
		v, err := r.uint(field, "a number of blocks or tokens", events.MaxEngineCount)
		if err == nil && *to != nil {
			return Errorf(CodeMalformed, "%s says again what kv_used_blocks says; give one of them", r.name(field))
		}
		*to = &v
		return err
	}
	return r.fields("", engineLoadFields, func(field string) error {
		switch field {
		case "worker":
			return r.string(field, (*string)(&l.Worker))
		case "rank":
			return r.uint32(field, (*uint32)(&l.Rank))
		case "kv_used_blocks", "kv_active_blocks":
			return count(field, &l.UsedBlocks)
		case "kv_total_blocks":
			return count(field, &l.TotalBlocks)
		case "active_decode_blocks":
			return count(field, &l.DecodeBlocks)
		case "active_prefill_tokens":
			return count(field, &l.PrefillTokens)
		case "age_ms":
			return r.uint64(field, &l.AgeMS)
		}
		_, err := r.float(field)
		return err
	})
}

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
	err := (&reader{unknown: IgnoreUnknown, what: "the request"}).read(contentType, body, &l)
	if err == nil {
		err = l.Check()
	}
	return &l, err
}

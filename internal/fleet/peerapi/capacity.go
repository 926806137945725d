package peerapi

import (
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// MaxCapacitySamples is the largest number of references in an answer with samples.
const MaxCapacitySamples = 1 << 16

// CapacitySamplesRequest is a request for a node's sampled references to blocks.
type CapacitySamplesRequest struct {
	Model string `json:"model" msgpack:"model"`
	Most  uint32 `json:"most" msgpack:"most"` // references
}

// Check returns an error for an invalid request. The error is an [api.Error].
func (c *CapacitySamplesRequest) Check() error {
	if c.Most == 0 || c.Most > MaxCapacitySamples {
		return api.Errorf(api.CodeMalformed, "most is %d; use 1 to %d", c.Most, MaxCapacitySamples)
	}
	return checkModel(c.Model)
}

// CapacitySamples has a node's sampled references to blocks, by their names in internal/operate/funnel.
type CapacitySamples struct {
	Disabled  bool              `json:"disabled,omitempty" msgpack:"disabled,omitempty"` // the node stores no samples
	BlockSize uint32            `json:"block_size" msgpack:"block_size"`                 // tokens; 0: no request is known
	Below     uint64            `json:"below" msgpack:"below"`                           // sampled names are smaller
	Refs      []byte            `json:"refs" msgpack:"refs"`                             // see internal/operate/capacity
	Workers   []events.WorkerID `json:"workers" msgpack:"workers"`
	Skipped   uint64            `json:"skipped" msgpack:"skipped"`
	Dropped   uint64            `json:"dropped" msgpack:"dropped"`
}

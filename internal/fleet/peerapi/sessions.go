package peerapi

import (
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// SessionBlocksRequest is a request for the blocks of a session on the ranks of some partitions.
type SessionBlocksRequest struct {
	Model      string             `json:"model,omitempty" msgpack:"model,omitempty"` // empty: all
	SessionID  string             `json:"session_id" msgpack:"session_id"`
	Partitions []events.Partition `json:"partitions" msgpack:"partitions"`
}

// Check returns an error for an invalid request. The error is an [api.Error].
func (r *SessionBlocksRequest) Check() error {
	return (&api.SessionEnd{SessionID: r.SessionID}).Check()
}

// SessionBlocks is a node's part of SessionList.Held.
type SessionBlocks struct {
	Held    []api.SessionHolding `json:"held" msgpack:"held"`
	Missing []events.Partition   `json:"missing,omitempty" msgpack:"missing,omitempty"` // not served by the node
	Unknown uint32               `json:"unknown_ranks,omitempty" msgpack:"unknown_ranks,omitempty"`
}

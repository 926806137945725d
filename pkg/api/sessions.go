package api

import (
	"context"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Bounds of a list of sessions.
const (
	UsualSessions = 1_000  // default of a request
	MaxSessions   = 10_000 // largest number in a request
)

// SessionsRequest is a request for the sessions of all models. Model and SessionID restrict the list.
type SessionsRequest struct {
	Model     string `json:"model,omitempty" msgpack:"model,omitempty"`
	SessionID string `json:"session_id,omitempty" msgpack:"session_id,omitempty"`
	Limit     uint32 `json:"limit,omitempty" msgpack:"limit,omitempty"` // default 1,000

	// Prompts adds the sessions without an id, which prompts continue.
	Prompts bool `json:"prompts,omitempty" msgpack:"prompts,omitempty"`
}

// Check returns an error for an invalid request. The error is an [Error].
func (r *SessionsRequest) Check() error {
	if r.Limit > MaxSessions {
		return Errorf(CodeMalformed, "limit is %d, more than %d", r.Limit, MaxSessions)
	}
	return checkSession(r.SessionID)
}

func (r *SessionsRequest) members(list []member) []member {
	return append(list, member{"model", &r.Model}, member{"session_id", &r.SessionID},
		member{"limit", (*positiveNumber)(&r.Limit)}, member{"prompts", &r.Prompts})
}

// SessionEnd is a request to end the bindings of a session: of one model, or of all models without Model.
type SessionEnd struct {
	Model     string `json:"model,omitempty" msgpack:"model,omitempty"`
	SessionID string `json:"session_id" msgpack:"session_id"`
}

// Check returns an error for an invalid request. The error is an [Error].
func (r *SessionEnd) Check() error {
	if r.SessionID == "" {
		return Errorf(CodeMalformed, "the request has no session_id")
	}
	return checkSession(r.SessionID)
}

func (r *SessionEnd) members(list []member) []member {
	return append(list, member{"model", &r.Model}, member{"session_id", &r.SessionID})
}

// SessionList is a list of sessions, the last used first.
type SessionList struct {
	Sessions []Session `json:"sessions" msgpack:"sessions"`
	Total    int       `json:"total" msgpack:"total"`       // sessions without the limit
	Affinity bool      `json:"affinity" msgpack:"affinity"` // false: nodes run without session_affinity and bind none

	// Of a request with SessionID: the blocks of the session on each rank whose engine announces the session in its
	// events. Without such an engine, the blocks are not known. Missing lists the partitions without an answer.
	Held    []SessionHolding   `json:"held,omitempty" msgpack:"held,omitempty"`
	Missing []events.Partition `json:"missing,omitempty" msgpack:"missing,omitempty"`

	// Unknown counts further ranks that may have blocks of the session: the index has lost older sessions of these ranks,
	// by a restart or by the limit of its memory.
	Unknown uint32 `json:"unknown_ranks,omitempty" msgpack:"unknown_ranks,omitempty"`
}

// SessionHolding has the blocks of a session on a rank: the block that the engine stored last for the session, and all
// blocks before it. A block in several tiers counts in each.
type SessionHolding struct {
	Model    string          `json:"model" msgpack:"model"`
	Worker   events.WorkerID `json:"worker" msgpack:"worker"`
	Rank     events.Rank     `json:"rank" msgpack:"rank"`
	Blocks   uint32          `json:"blocks" msgpack:"blocks"` // held or not
	Device   uint32          `json:"device" msgpack:"device"`
	Host     uint32          `json:"host" msgpack:"host"`
	Disk     uint32          `json:"disk" msgpack:"disk"`
	External uint32          `json:"external" msgpack:"external"`
}

// Session is a session that is bound to a rank.
type Session struct {
	Model  string          `json:"model" msgpack:"model"`
	ID     string          `json:"session_id" msgpack:"session_id"` // of a session without an id: prompt: and a hash
	Worker events.WorkerID `json:"worker" msgpack:"worker"`
	Rank   events.Rank     `json:"rank" msgpack:"rank"`

	// LastUse is the time of the last request, or of the answer while a request runs. A running request on another node
	// makes it up to a quarter of the time to live older.
	LastUse time.Time `json:"last_use" msgpack:"last_use"`
	Expires time.Time `json:"expires" msgpack:"expires"` // without a further use
}

// Insights lists and ends sessions, attributes tokens to tenants, and supports the scaling of the fleet. Errors are of
// type *Error.
type Insights interface {
	Sessions(ctx context.Context, r *SessionsRequest) (*SessionList, error)

	// EndSession returns the ended sessions. A session without a binding is no error.
	EndSession(ctx context.Context, r *SessionEnd) (*SessionList, error)

	RemovalOrder(ctx context.Context, r *RemovalRequest) (*RemovalOrder, error)
	Scaling(ctx context.Context, r *ScalingRequest) (*Scaling, error)

	Tenants(ctx context.Context, r *TenantsRequest) (*TenantList, error)
}

package api

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Bounds of a list of tenants.
const (
	UsualTenants = 1_000 // default of a request
	MaxTenants   = 2_000 // largest number in a request, and of tenants on a node
)

// TenantsRequest is a request for the tokens and blocks of tenants, of a model, or of all models with an empty Model.
type TenantsRequest struct {
	Model string `json:"model,omitempty" msgpack:"model,omitempty"`

	// Since is the length of the window up to now, as in a FunnelRequest.
	Since string `json:"since,omitempty" msgpack:"since,omitempty"`

	Limit uint32 `json:"limit,omitempty" msgpack:"limit,omitempty"` // tenants with a row; default 1,000

	// Held adds the held blocks, of a single model. The nodes visit their whole index.
	Held bool `json:"held,omitempty" msgpack:"held,omitempty"`
}

// Check returns an error for an invalid request. The error is an [Error].
func (r *TenantsRequest) Check() error {
	switch {
	case r.Limit > MaxTenants:
		return Errorf(CodeMalformed, "limit is %d, more than %d", r.Limit, MaxTenants)
	case r.Held && r.Model == "":
		return Errorf(CodeMissingModel, "held blocks are of a model; add a model")
	}
	_, err := r.Window()
	return err
}

// Window returns the length of the window. The error is an [Error].
func (r *TenantsRequest) Window() (time.Duration, error) {
	return (&FunnelRequest{Since: r.Since}).Window()
}

func (r *TenantsRequest) members(list []member) []member {
	return append(list, member{"model", &r.Model}, member{"since", &r.Since},
		member{"limit", (*positiveNumber)(&r.Limit)}, member{"held", &r.Held})
}

// TenantList has the tokens of the recorded requests by tenant. The sums over all rows are the sums of the funnels of
// all models in the same window.
type TenantList struct {
	Off bool `json:"off,omitempty" msgpack:"off,omitempty"` // requests are not attributed: no node has --tenants

	From time.Time `json:"from" msgpack:"from"` // as in a Funnel
	To   time.Time `json:"to" msgpack:"to"`

	Tenants []TenantUse `json:"tenants" msgpack:"tenants"` // the most requested tokens first
	None    TenantUse   `json:"none" msgpack:"none"`       // requests without a tenant
	Other   TenantUse   `json:"other" msgpack:"other"`     // tenants beyond the bounds of the nodes or of the answer
	Total   TenantUse   `json:"total" msgpack:"total"`

	// Folded is the number of tenants beyond the limit of the answer, which are under Other.
	Folded int `json:"folded" msgpack:"folded"`

	// UnattributedBlocks, with held blocks, are blocks of unknown tenants: no node has recorded a request with the begin
	// of their prompts.
	UnattributedBlocks *uint64 `json:"unattributed_blocks,omitempty" msgpack:"unattributed_blocks,omitempty"`

	Nodes   []TenantNode       `json:"nodes" msgpack:"nodes"`                         // nodes that answered, by name
	Missing []string           `json:"missing,omitempty" msgpack:"missing,omitempty"` // nodes without an answer
	Absent  []events.Partition `json:"absent,omitempty" msgpack:"absent,omitempty"`   // partitions without held blocks
}

// TenantUse has the tokens of a tenant. Requested is the sum of Reused, Expected, Computed and Unserved.
type TenantUse struct {
	Tenant string `json:"tenant" msgpack:"tenant"` // SOURCE:VALUE, or SOURCE:#HASH

	Requests  uint64 `json:"requests" msgpack:"requests"`
	Routed    uint64 `json:"routed" msgpack:"routed"`       // requests with a choice
	Reported  uint64 `json:"reported" msgpack:"reported"`   // choices with a report of the engine
	Requested uint64 `json:"requested" msgpack:"requested"` // tokens of prompts
	Reused    uint64 `json:"reused" msgpack:"reused"`       // tokens, by reports of engines
	Expected  uint64 `json:"expected" msgpack:"expected"`   // tokens held by the chosen workers, without a report
	Computed  uint64 `json:"computed" msgpack:"computed"`   // other tokens of prompts with a chosen worker
	Unserved  uint64 `json:"unserved" msgpack:"unserved"`   // tokens of prompts without a chosen worker

	// The effects of a quota. The tokens of rejected requests are not among Requested.
	Rejected       uint64 `json:"rejected" msgpack:"rejected"`
	RejectedTokens uint64 `json:"rejected_tokens" msgpack:"rejected_tokens"`
	Lowered        uint64 `json:"lowered" msgpack:"lowered"`

	// Missed bounds the requested and rejected tokens of the tenant that are under Other instead. 0: the row is exact.
	Missed uint64 `json:"missed" msgpack:"missed"`

	// HeldBlocks are the blocks on all ranks and tiers now, a copy counted each time; null: not requested, or not known,
	// because tenants by header or API key share blocks.
	HeldBlocks *uint64 `json:"held_blocks,omitempty" msgpack:"held_blocks,omitempty"`
}

// TenantNode has the bounds of a node.
type TenantNode struct {
	Node     string `json:"node" msgpack:"node"`
	Off      bool   `json:"off,omitempty" msgpack:"off,omitempty"` // without --tenants: the node's requests are missing
	Limit    int    `json:"limit" msgpack:"limit"`                 // tenants with separate sums
	Tenants  int    `json:"tenants" msgpack:"tenants"`             // now
	Replaced uint64 `json:"replaced" msgpack:"replaced"`           // tenants that made room for others, since the start
	Floor    uint64 `json:"floor" msgpack:"floor"`                 // bound of Missed of a tenant without a row
	Dropped  uint64 `json:"dropped" msgpack:"dropped"`             // requests without a record, as in a Funnel
	Pooled   uint64 `json:"pooled" msgpack:"pooled"`               // requests that shared the quota of other tenants
	Unknown  uint64 `json:"unknown" msgpack:"unknown"`             // prompts beyond the bound of known first blocks
}

// QuotaState is the state of a tenant's quota, in the error quota_exceeded, or in a choice with a lowered priority.
type QuotaState struct {
	Tenant          string `json:"tenant" msgpack:"tenant"`
	TokensPerMinute uint64 `json:"tokens_per_minute" msgpack:"tokens_per_minute"`
	Action          string `json:"action" msgpack:"action"`                 // rejected or lowered
	RetryAfterMS    uint64 `json:"retry_after_ms" msgpack:"retry_after_ms"` // until the tenant is within the quota
}

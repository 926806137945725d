package peerapi

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// MaxTenantRoots is the largest number of first blocks in a TenantsPart, of each of its lists.
const MaxTenantRoots = 32_768

// TenantsPartRequest is a request for a node's part of a TenantList.
type TenantsPartRequest struct {
	Model string `json:"model" msgpack:"model"`
	Since string `json:"since" msgpack:"since"`

	// Held adds the first blocks of prompts, and the held blocks of some partitions.
	Held       bool               `json:"held" msgpack:"held"`
	Partitions []events.Partition `json:"partitions" msgpack:"partitions"`
}

// Check returns an error for an invalid request. The error is an [api.Error].
func (r *TenantsPartRequest) Check() error {
	_, err := (&api.FunnelRequest{Since: r.Since}).Window()
	return err
}

// TenantsPart is a node's part of a TenantList.
type TenantsPart struct {
	Node    api.TenantNode  `json:"node" msgpack:"node"`
	From    time.Time       `json:"from" msgpack:"from"`
	To      time.Time       `json:"to" msgpack:"to"`
	Tenants []api.TenantUse `json:"tenants" msgpack:"tenants"` // with names
	None    api.TenantUse   `json:"none" msgpack:"none"`
	Other   api.TenantUse   `json:"other" msgpack:"other"`

	// Shared means that tenants share blocks, so that held blocks have no tenant.
	Shared bool         `json:"shared" msgpack:"shared"`
	Names  []string     `json:"names" msgpack:"names"` // of Roots
	Roots  []TenantRoot `json:"roots" msgpack:"roots"` // tenants of first blocks of prompts
	Held   []HeldRoot   `json:"held" msgpack:"held"`   // by first block, most blocks first
	Rest   uint64       `json:"rest" msgpack:"rest"`   // further held blocks

	Absent []events.Partition `json:"absent" msgpack:"absent"` // requested partitions without an index
}

// TenantRoot is the tenant of a first block of prompts, as an index in TenantsPart.Names.
type TenantRoot struct {
	First  uint64 `json:"first" msgpack:"first"` // local hash
	Tenant uint32 `json:"tenant" msgpack:"tenant"`
}

// HeldRoot has the held blocks of all prompts with a first block.
type HeldRoot struct {
	First  uint64 `json:"first" msgpack:"first"` // local hash
	Blocks uint64 `json:"blocks" msgpack:"blocks"`
}

// TenantCharges has the tokens that a node has charged to quotas, since the node made each bucket.
type TenantCharges struct {
	Tenants []TenantCharge `json:"tenants" msgpack:"tenants"`
}

// TenantCharge is a bucket of a quota. Another Serial is another bucket.
type TenantCharge struct {
	Tenant string `json:"tenant" msgpack:"tenant"`
	Serial uint64 `json:"serial" msgpack:"serial"`
	Tokens int64  `json:"tokens" msgpack:"tokens"`
}

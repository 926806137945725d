package peerapi

import (
	"context"
	"maps"
	"slices"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Node answers the requests of other nodes from its own data. Errors are of type *[api.Error].
type Node interface {
	// BlockHistory returns the node's records of blocks.
	BlockHistory(ctx context.Context, q *BlockHistoryRequest) (*BlockHistory, error)

	// CapacitySamples returns the node's sampled references to blocks.
	CapacitySamples(ctx context.Context, q *CapacitySamplesRequest) (*CapacitySamples, error)

	// HotPart returns the node's part of the hot prefixes.
	HotPart(ctx context.Context, q *api.HotRequest) (*HotPart, error)

	// Copied records the copy of a prefix by another node.
	Copied(ctx context.Context, note *CopyNote) error

	// SessionBlocks returns the blocks of a session on the node's workers.
	SessionBlocks(ctx context.Context, q *SessionBlocksRequest) (*SessionBlocks, error)

	// RemovalPart returns the node's part of the order of removal.
	RemovalPart(ctx context.Context, q *api.RemovalRequest) (*RemovalPart, error)

	// TenantsPart returns the node's part of the tokens and held blocks of tenants.
	TenantsPart(ctx context.Context, q *TenantsPartRequest) (*TenantsPart, error)

	// TenantCharges returns the tokens that the node has charged to quotas.
	TenantCharges(ctx context.Context) (*TenantCharges, error)
}

// operation reads a request, and calls a method of a node.
type operation func(ctx context.Context, n Node, contentType string, body []byte) (any, error)

var operations = map[string]operation{
	ops.BlockHistory:    method(Node.BlockHistory),
	ops.CapacitySamples: method(Node.CapacitySamples),
	ops.HotPart:         method(Node.HotPart),
	ops.Copied: method(func(n Node, ctx context.Context, note *CopyNote) (api.Done, error) {
		return api.Done{Done: true}, n.Copied(ctx, note)
	}),
	ops.SessionBlocks: method(Node.SessionBlocks),
	ops.RemovalPart:   method(Node.RemovalPart),
	ops.TenantsPart:   method(Node.TenantsPart),
	ops.TenantCharges: func(ctx context.Context, n Node, _ string, _ []byte) (any, error) { return n.TenantCharges(ctx) },
}

// Names returns the names of all operations, in order.
func Names() []string { return slices.Sorted(maps.Keys(operations)) }

// Served is a served operation, for [api.Handler.Further].
type Served = func(ctx context.Context, contentType string, body []byte) (any, error)

// Operations returns the operations of a node by name.
func Operations(n Node) map[string]Served {
	list := make(map[string]Served, len(operations))
	for name, do := range operations {
		list[name] = func(ctx context.Context, contentType string, body []byte) (any, error) {
			return do(ctx, n, contentType, body)
		}
	}
	return list
}

// request is a pointer to the type of a request.
type request[Q any] interface {
	*Q
	Check() error
}

func method[Q, A any, P request[Q]](do func(Node, context.Context, P) (A, error)) operation {
	return func(ctx context.Context, n Node, contentType string, body []byte) (any, error) {
		q := P(new(Q))
		if err := api.Unmarshal(contentType, body, q); err != nil {
			return nil, err
		}
		if err := q.Check(); err != nil {
			return nil, err
		}
		return do(n, ctx, q)
	}
}

func checkModel(model string) error {
	if model == "" {
		return api.Errorf(api.CodeMissingModel, "the request has no model")
	}
	return nil
}

package peerapi

import (
	"context"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

// Client sends requests to another node. It is a [Node].
type Client struct{ *client.Client }

// BlockHistory returns the other node's records of blocks.
func (c Client) BlockHistory(ctx context.Context, q *BlockHistoryRequest) (*BlockHistory, error) {
	return call[BlockHistory](ctx, c, ops.BlockHistory, q)
}

// CapacitySamples returns the other node's sampled references to blocks.
func (c Client) CapacitySamples(ctx context.Context, q *CapacitySamplesRequest) (*CapacitySamples, error) {
	return call[CapacitySamples](ctx, c, ops.CapacitySamples, q)
}

// HotPart returns the other node's part of the hot prefixes.
func (c Client) HotPart(ctx context.Context, q *api.HotRequest) (*HotPart, error) {
	return call[HotPart](ctx, c, ops.HotPart, q)
}

// Copied reports a copy to the other node.
func (c Client) Copied(ctx context.Context, note *CopyNote) error {
	_, err := call[api.Done](ctx, c, ops.Copied, note)
	return err
}

// SessionBlocks returns the blocks of a session on the other node's workers.
func (c Client) SessionBlocks(ctx context.Context, q *SessionBlocksRequest) (*SessionBlocks, error) {
	return call[SessionBlocks](ctx, c, ops.SessionBlocks, q)
}

// RemovalPart returns the other node's part of the order of removal.
func (c Client) RemovalPart(ctx context.Context, q *api.RemovalRequest) (*RemovalPart, error) {
	return call[RemovalPart](ctx, c, ops.RemovalPart, q)
}

// TenantsPart returns the other node's part of the tokens and held blocks of tenants.
func (c Client) TenantsPart(ctx context.Context, q *TenantsPartRequest) (*TenantsPart, error) {
	return call[TenantsPart](ctx, c, ops.TenantsPart, q)
}

// TenantCharges returns the tokens that the other node has charged to quotas.
func (c Client) TenantCharges(ctx context.Context) (*TenantCharges, error) {
	return call[TenantCharges](ctx, c, ops.TenantCharges, nil)
}

func call[A any](ctx context.Context, c Client, op string, q any) (*A, error) {
	answer := new(A)
	if err := c.Call(ctx, op, q, answer); err != nil {
		return nil, err
	}
	return answer, nil
}

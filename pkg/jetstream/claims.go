package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
)

// claimsLook is the time between two requests of [Namespace.WatchClaimsRequired] on one connection. A server that
// reloads its configuration can change permissions without closing connections.
const claimsLook = 3 * time.Second

// userInfo is the subject of a request for a user's account and permissions (nats-server).
const userInfo = "$SYS.REQ.USER.INFO"

// ClaimsRequired reports whether the NATS server requires this user to enforce model claims: whether the user's publish
// permissions list [Names.ClaimsRequired] by name. A matching wildcard does not count. The result is false if the user
// has no permissions, may not send the request, or the server has no such service.
//
// The error wraps [ErrUnavailable] if the server did not respond until the context ended.
func (n *Namespace) ClaimsRequired(ctx context.Context) (required bool, err error) {
	var reply *nats.Msg
	err = n.c.retry(ctx, func() (err error) {
		reply, err = n.c.request(ctx, &nats.Msg{Subject: userInfo})
		if errors.Is(err, nats.ErrNoResponders) {
			reply, err = nil, nil
		}
		return err
	})
	switch {
	case classOf(err) == ErrDenied, err == nil && reply == nil:
		return false, nil
	case err != nil:
		return false, failed("request the permissions of this NATS user", err)
	}
	var info struct {
		Data struct {
			Permissions struct {
				Publish struct {
					Allow []string `json:"allow"`
				} `json:"publish"`
			} `json:"permissions"`
		} `json:"data"`
	}
	if err := json.Unmarshal(reply.Data, &info); err != nil {
		return false, fmt.Errorf("read the permissions of this NATS user: %w", err)
	}
	return slices.Contains(info.Data.Permissions.Publish.Allow, n.name.ClaimsRequired()), nil
}

// WatchClaimsRequired calls observe with the result of [Namespace.ClaimsRequired] after each connect and every few
// seconds, until ctx ends. It does not call observe while the server does not respond.
func (n *Namespace) WatchClaimsRequired(ctx context.Context, observe func(required bool)) {
	for ctx.Err() == nil {
		lost := n.c.untilLost()
		required, err := n.ClaimsRequired(ctx)
		if err == nil {
			observe(required)
		}
		look := time.NewTimer(claimsLook)
		select {
		case <-lost:
		case <-look.C:
		case <-ctx.Done():
		}
		look.Stop()
	}
}

package api

import (
	"context"
)

// Requester carries one request to whichever node serves an operation and returns its reply, both of a content type.
type Requester func(ctx context.Context, op, contentType string, body []byte) (reply []byte, err error)

// Client asks an indexer. Any number of goroutines may use it.
type Client struct{ request Requester }

// NewClient returns a client that asks by request.
func NewClient(request Requester) *Client { return &Client{request: request} }

// Find asks who holds how much of a prompt. An error that the node gave is an *Error.
func (c *Client) Find(ctx context.Context, q *Query) (*Answer, error) {
	return call[Answer](ctx, c, OpFind, q)
}

// Workers asks what the log knows of ranks, in parts: those that come or go meanwhile may be in the list or not.
func (c *Client) Workers(ctx context.Context) (*WorkerList, error) {
	all := &WorkerList{Workers: []WorkerInfo{}}
	for {
		part, err := call[WorkerList](ctx, c, OpWorkers, &WorkersRequest{After: all.Next, Limit: WorkersPage})
		if err != nil {
			return nil, err
		}
		if all.Append(part); all.Next == nil {
			return all, nil
		}
	}
}

// Status asks how the node is doing that answers.
func (c *Client) Status(ctx context.Context) (*Status, error) {
	return call[Status](ctx, c, OpStatus, nil)
}

// StatusOf asks how one node is doing, by way of whichever takes the request.
func (c *Client) StatusOf(ctx context.Context, node string) (*Status, error) {
	s, err := call[Status](ctx, c, OpStatus, &StatusRequest{Node: node})
	if err == nil && s.Node != node {
		return nil, Errorf(CodeUnavailable, "node %s answered, whose version does not ask others: %s", s.Node,
			s.Version)
	}
	return s, err
}

// Verify asks how the node is doing, with a checksum of each partition; of those in at, at that place in the log if the
// node has not passed it.
func (c *Client) Verify(ctx context.Context, at []PartitionSeq) (*Status, error) {
	return call[Status](ctx, c, OpVerify, &VerifyRequest{At: at})
}

// Snapshot has every partition's snapshot written now.
func (c *Client) Snapshot(ctx context.Context) (*SnapshotList, error) {
	return call[SnapshotList](ctx, c, OpSnapshot, nil)
}

func call[T any](ctx context.Context, c *Client, op string, q any) (*T, error) {
	var body []byte
	if q != nil {
		var err error
		if body, err = Marshal(MsgPack, q); err != nil {
			return nil, err
		}
	}
	reply, err := c.request(ctx, op, MsgPack, body)
	if err != nil {
		return nil, err
	}
	out := new(T)
	if err := DecodeReply(MsgPack, reply, out); err != nil {
		return nil, err
	}
	return out, nil
}

// Package remote sends the requests of commands to running indexers, over NATS or HTTP, and reads prompts from flags.
//
//	t := remote.Flags(cmd)
//	_, err := remote.Show(ctx, t, func(ctx context.Context, c *client.Client) (*api.WorkerList, error) {
//		return c.Workers(ctx)
//	}, tables.Workers)
//
// Package cli has the flags of the NATS connection, and package client the protocol.
package remote

// Package cluster measures the costs of a cluster of nodes for the command `indexer bench cluster`.
//
// All parts run as separate processes on loopback: a NATS server, nodes (indexer serve), and an echo, which answers
// requests with a requested number of bytes. This process contains the shims and the client. The steps, in order:
//
//  1. A node with all partitions reads all events in [Rounds] rounds. Then the node writes a snapshot, and another
//     process restores the snapshot. In every form, queries for a long prompt alternate with bare requests of equal
//     sizes to the echo.
//  2. Three nodes with two replicas read the same events.
//  3. Queries to the three nodes alternate with bare requests of equal sizes. Bare requests go to the echo and to three
//     relays. A relay sends a request to another relay before the reply, as nodes do. With the chosen names of the
//     nodes, no node keeps all partitions, so every query needs a second node.
//  4. A node is killed during queries, and the other nodes restore the partitions.
//
// `indexer bench select` ([RunSelect]) measures the selection of workers in the same environment: by stage in this
// process, on three nodes alternating with bare requests, and on a single node beside Dynamo's selection service.
//
// All parts share the machine, so only figures from the same run are comparable.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
)

// Options configures a measurement.
type Options struct {
	Program string // the indexer's executable

	Workers    int
	Blocks     int // of a worker
	Queries    int
	Partitions uint32

	Accounts bool // gives every role a NATS account
}

// Defaults are small.
func Defaults() Options { return Options{Workers: 32, Blocks: 65_536, Queries: 5000, Partitions: 8} }

// Validate returns all faults of the options.
func (o *Options) Validate() error {
	var errs []error
	if o.Workers < 1 || o.Workers > 4096 {
		errs = append(errs, fmt.Errorf("--workers %d is not from 1 to 4096", o.Workers))
	}
	if o.Blocks < prompt || o.Blocks > 1<<22 {
		errs = append(errs, fmt.Errorf("--blocks %d is not from %d to %d", o.Blocks, prompt, 1<<22))
	}
	if o.Queries < 100 {
		errs = append(errs, fmt.Errorf("--queries %d: percentiles need 100 at least", o.Queries))
	}
	if o.Partitions < 3 || o.Partitions > 512 {
		errs = append(errs, fmt.Errorf("--partitions %d is not from 3 to 512", o.Partitions))
	}
	return errors.Join(errs...)
}

const (
	model     = "m"
	blockSize = 16
	perEvent  = 64
	perBatch  = 16 // events
	prompt    = 2 * perEvent
	flight    = 64 // messages published at once
	patience  = 2 * time.Minute
	echoAt    = "bench.echo"
	relayAt   = "bench.relay"
	relays    = 3
)

// Rounds is the number of times that a worker stores all its blocks. Before a further round, the worker removes all
// blocks.
const Rounds = 4

// Run measures all steps. It calls progress with a line for every step.
func Run(ctx context.Context, o Options, progress func(string)) (r *Report, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	b := &bed{ctx: ctx, o: o, progress: progress, names: nodeNames(o.Partitions, 2)}
	if b.dir, err = os.MkdirTemp("", "kvatlas-bench-"); err != nil {
		return nil, err
	}
	defer os.RemoveAll(b.dir)
	server, err := b.connect()
	if err != nil {
		return nil, err
	}
	defer server.stop()
	defer b.users.close()
	b.report.Workers = o.Workers
	if err := b.one(); err != nil {
		return nil, fmt.Errorf("one node: %w", err)
	}
	if err := b.three(); err != nil {
		return nil, fmt.Errorf("three nodes: %w", err)
	}
	v := &b.report
	v.QueryP50, v.QueryP99 = v.Query.P50/v.Bare.P50, v.Query.P99/v.Bare.P99
	v.RelayP50 = v.Relay.P50 / v.Bare.P50
	v.Ingest = v.Three.PerCPU / v.One.PerCPU
	v.Rereplication = v.Rereplicated.Rate / v.Restore.Rate
	return v, nil
}

func (b *bed) one() error {
	b.progress("one node takes in events")
	n, err := b.node("one", "one")
	if err != nil {
		return err
	}
	defer n.stop()
	client := b.client("one")
	if err := b.settled(client, 1, 1); err != nil {
		return err
	}
	if b.report.One, err = b.ingest("one", client, 1, n); err != nil {
		return err
	}
	b.report.Holdings = b.report.One.Blocks / Rounds
	b.progress("snapshot, restore")
	within, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	if _, err := b.clientOf("one", natsauth.RoleNode).Snapshot(within); err != nil {
		return err
	}
	n.stop()
	again, err := b.node("one", "again")
	if err != nil {
		return err
	}
	defer again.stop()
	if err := b.settled(client, 1, 1); err != nil {
		return err
	}
	lines := 0
	if b.report.Restore, _, lines, err = restored(time.Time{}, again); err == nil && lines == 0 {
		err = errors.New("the node's log has no line about restored partitions")
	}
	if err == nil {
		err = b.located(client)
	}
	if err != nil {
		return err
	}
	b.progress("queries in each form")
	return b.forms("one")
}

func (b *bed) three() error {
	b.progress("three nodes take in events")
	var nodes []*process
	defer func() {
		for _, n := range nodes {
			n.kill()
		}
	}()
	for _, id := range b.names {
		n, err := b.node("three", id)
		if err != nil {
			return err
		}
		nodes = append(nodes, n)
	}
	client := b.client("three")
	if err := b.settled(client, 3, 2); err != nil {
		return err
	}
	var err error
	if b.report.Three, err = b.ingest("three", client, 2, nodes...); err != nil {
		return err
	}
	if err := b.located(client); err != nil {
		return err
	}
	b.progress("queries")
	if err := b.queries(); err != nil {
		return err
	}
	b.progress("snapshot, a node is killed")
	for _, id := range b.names { // every node writes its own partitions
		within, cancel := context.WithTimeout(b.ctx, patience)
		_, err := b.nodeClient("three", id).Snapshot(within)
		cancel()
		if err != nil {
			return err
		}
	}
	return b.failover(client, nodes)
}

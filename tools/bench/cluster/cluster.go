// Package cluster measures what being several nodes costs: `indexer bench cluster` prints what it finds.
//
// Everything runs as a process of its own on loopback: a NATS server, nodes (indexer serve), and an echo, which answers
// requests with as many bytes as it is asked for. This process is the shims and the client. The steps, in order:
//
//  1. One node with everything takes in all events, [Rounds] times over; then it writes a snapshot, and another process
//     restores it. It is asked in each form for a long prompt, by turns with bare requests of the same sizes to the
//     echo.
//  2. Three nodes with two replicas take in the same events.
//  3. Queries to any of the three, and bare requests of the same sizes, by turns: to the echo, and to three relays, of
//     which one gets the request and asks another before it answers, as nodes do. The nodes' names are chosen so that
//     none keeps all partitions, which makes every query travel.
//  4. One of the three is killed while queries are asked, and its partitions are restored by the others.
//
// `indexer bench select` ([RunSelect]) measures the choice of workers on the same bed: in this process by stage, on
// three nodes by turns with bare requests, and on one node beside Dynamo's selection service.
//
// All share the machine, so that only what stands side by side may be compared.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Options says what to measure.
type Options struct {
	Program string // the indexer's executable

	Workers    int
	Blocks     int // each worker's
	Queries    int
	Partitions uint32

	Accounts bool // NATS users have accounts of their own
}

// Defaults are small.
func Defaults() Options { return Options{Workers: 32, Blocks: 65_536, Queries: 5000, Partitions: 8} }

// Validate refuses what cannot be measured.
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

// Rounds is how often each worker stores all its blocks; before each but the first it loses them all.
const Rounds = 4

// Run measures everything. Progress is told in a line for each step.
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
	if _, err := b.clientOf("one", jetstream.RoleNode).Snapshot(within); err != nil {
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
		err = errors.New("the node's log lines tell of nothing that was restored")
	}
	if err == nil {
		err = b.heard(client)
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
	if err := b.heard(client); err != nil {
		return err
	}
	b.progress("queries")
	if err := b.queries(); err != nil {
		return err
	}
	b.progress("snapshot, a node is killed")
	for _, id := range b.names { // each writes those that are its own to write
		within, cancel := context.WithTimeout(b.ctx, patience)
		_, err := b.nodeClient("three", id).Snapshot(within)
		cancel()
		if err != nil {
			return err
		}
	}
	return b.failover(client, nodes)
}

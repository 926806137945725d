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
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/cluster"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/rpc"
	"github.com/kvatlas/kvatlas/tools/corpus"
)

// Options says what to measure.
type Options struct {
	Program string // the indexer's executable

	Workers    int
	Blocks     int // each worker's
	Queries    int
	Partitions uint32
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

// Report is what was found. The ratios come first; a bound is beside each.
type Report struct {
	QueryP50 float64 `json:"query_p50_ratio"` // three nodes beside a bare request-reply; at most 2.5
	QueryP99 float64 `json:"query_p99_ratio"` // the same; at most 4
	// a request to any of three processes, which asks another of them before it answers, beside a bare request-reply:
	// what a query over three nodes would take if nodes had nothing to do
	RelayP50 float64 `json:"relay_p50_ratio"`
	// blocks applied per second of processor time, three nodes beside one; at least 0.8
	Ingest float64 `json:"ingest_ratio"`
	// after a node is killed, the last query that was not answered whole was asked; at most 1
	WholeAgain float64 `json:"whole_again_s"`
	// holdings restored per second after that, beside a restore of one node
	Rereplication float64 `json:"rereplication_ratio"`

	Workers  int    `json:"workers"`
	Holdings uint64 `json:"holdings"` // of one replica
	Asked    int    `json:"request_bytes"`
	Answered int    `json:"reply_bytes"`

	Forms []Form `json:"one_node_forms"` // each at most 1.3 times a bare request

	Query Times `json:"query"`
	Bare  Times `json:"bare"`
	Relay Times `json:"relay"`
	One   Taken `json:"one_node"`
	Three Taken `json:"three_nodes"`

	FailQueries  int      `json:"failover_queries"`
	NotWhole     int      `json:"failover_not_whole"`
	FailLongest  float64  `json:"failover_longest_s"` // query that was answered whole
	Believed     float64  `json:"believed_dead_s"`    // after the kill, until the others began to restore
	Redundant    float64  `json:"redundant_again_s"`  // after the kill, until every partition was ready on two nodes
	Restore      Restored `json:"restore"`            // of one node
	Rereplicated Restored `json:"rereplicated"`       // by the two that are left
}

// Times are of requests, in microseconds.
type Times struct {
	N   int     `json:"n"`
	P50 float64 `json:"p50_us"`
	P99 float64 `json:"p99_us"`
	Max float64 `json:"max_us"`
}

// Taken is what nodes took in.
type Taken struct {
	Blocks     uint64  `json:"blocks"` // applied, on all replicas
	Seconds    float64 `json:"s"`
	CPU        float64 `json:"cpu_s"`            // of the nodes
	PerCPU     float64 `json:"blocks_per_cpu_s"` // what one core that does nothing else would apply
	PerSeconds float64 `json:"blocks_per_s"`
}

// Restored is what nodes restored from snapshots.
type Restored struct {
	Holdings uint64  `json:"holdings"`
	Seconds  float64 `json:"s"`
	Rate     float64 `json:"holdings_per_s"`
}

func timesOf(took []time.Duration) Times {
	slices.Sort(took)
	at := func(q float64) float64 {
		return float64(took[min(len(took)-1, int(q*float64(len(took))))].Nanoseconds()) / 1e3
	}
	return Times{len(took), at(0.5), at(0.99), at(1)}
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

// bed is what is measured on.
type bed struct {
	ctx      context.Context
	o        Options
	dir      string
	url      string
	conn     *jetstream.Conn
	pool     *rpc.Pool
	names    []string                              // of the three nodes
	filled   map[events.Partition]events.StreamSeq // what was taken in last: partitions that have events, and up to where
	progress func(string)
	report   Report
}

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
	defer b.conn.Close()
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

// connect starts a NATS server and connects to it.
func (b *bed) connect() (server *process, err error) {
	if server, err = b.start("bench", "cluster", "--role", "nats", "--data", filepath.Join(b.dir, "nats")); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			server.stop()
		}
	}()
	m, err := server.wait(b.ctx, `listen=(\S+)`)
	if err != nil {
		return nil, err
	}
	return server, b.join(m[1])
}

// join connects to a NATS server.
func (b *bed) join(url string) (err error) {
	b.url = url
	if b.conn, err = jetstream.Connect(b.ctx, jetstream.ConnOptions{URLs: []string{url}}); err == nil {
		b.pool, err = rpc.NewPool(b.conn.NATS())
	}
	return err
}

// RunRole is what the processes beside the nodes do, until ctx ends: "nats", "echo" or "relay0" to
// "relay2".
func RunRole(ctx context.Context, role, data, url string, say io.Writer) error {
	switch role {
	case "nats":
		server, err := jetstream.StartServer(ctx, jetstream.ServerOptions{Dir: data, Listen: "127.0.0.1:0",
			SyncInterval: 2 * time.Minute})
		if err != nil {
			return err
		}
		defer server.Stop()
		fmt.Fprintf(say, "listen=%s\n", server.Addr())
		<-ctx.Done()
		return nil
	case "echo", "relay0", "relay1", "relay2":
		conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{URLs: []string{url}})
		if err != nil {
			return err
		}
		defer conn.Close()
		zeros := make([]byte, 1<<20)
		endpoints := []jetstream.Endpoint{{Name: "echo", Subject: echoAt, Handler: func(_ context.Context,
			r jetstream.Request) jetstream.Response {
			n := 0
			if len(r.Body) >= 4 {
				n = int(min(binary.LittleEndian.Uint32(r.Body), uint32(len(zeros)/2)))
			}
			return jetstream.Response{ContentType: api.MsgPack, Body: zeros[:n]}
		}}}
		if own, is := strings.CutPrefix(role, "relay"); is {
			endpoints[0].Subject = relayAt + "." + own
			endpoints = append(endpoints, jetstream.Endpoint{Name: "relay", Subject: relayAt, QueueGroup: "relays",
				Handler: relay(conn, own, say)})
		}
		service, err := jetstream.Serve(conn, jetstream.ServiceConfig{Name: role, Version: "0.0.0", Workers: 128,
			Endpoints: endpoints})
		if err != nil {
			return err
		}
		if err := conn.NATS().Flush(); err != nil { // after it the server knows who serves
			return err
		}
		fmt.Fprintln(say, "ready")
		<-ctx.Done()
		stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		service.Stop(stopping)
		return nil
	}
	return fmt.Errorf("role %q is none of nats, echo and relay0 to relay2", role)
}

// relay answers with what the two other relays say, one after the other.
func relay(conn *jetstream.Conn, own string, say io.Writer) jetstream.Handler {
	var others []string
	for i := range relays {
		if name := strconv.Itoa(i); name != own {
			others = append(others, relayAt+"."+name)
		}
	}
	var turn atomic.Uint32
	return func(ctx context.Context, r jetstream.Request) jetstream.Response {
		reply, err := conn.Request(ctx, others[int(turn.Add(1))%len(others)], api.MsgPack, r.Body)
		if err != nil {
			fmt.Fprintln(say, err)
			return jetstream.Response{}
		}
		return jetstream.Response{ContentType: api.MsgPack, Body: reply.Body}
	}
}

// nodeNames returns names of three nodes of which none keeps all partitions, where that can be.
func nodeNames(partitions uint32, copies int) (names []string) {
	for try := range 1000 {
		names = names[:0]
		kept := map[string]uint32{}
		for _, letter := range []string{"a", "b", "c"} {
			names = append(names, letter+strconv.Itoa(try))
		}
		for p := range events.Partition(partitions) {
			for _, owner := range cluster.Order(names, nil, p)[:min(copies, len(names))] {
				kept[owner]++
			}
		}
		if copies >= len(names) || max(kept[names[0]], kept[names[1]], kept[names[2]]) < partitions {
			break
		}
	}
	return names
}

// node starts a node and waits until it is ready.
func (b *bed) node(namespace, id string, args ...string) (*process, error) {
	p, err := b.start(append([]string{"serve", "--nats", b.url, "--namespace", namespace, "--node-id", id,
		"--replication", "2", "--http-listen", "",
		"--partitions", fmt.Sprint(b.o.Partitions), "--snapshot-interval", "1000h", "--log-age", "2000h",
		"--snapshot-blocks", "4000000000",
		"--log-bytes", fmt.Sprint(64<<20 + 24*Rounds*b.o.Workers*b.o.Blocks)}, args...)...)
	if err != nil {
		return nil, err
	}
	if _, err := p.wait(b.ctx, `msg=ready`); err != nil {
		p.stop()
		return nil, err
	}
	return p, nil
}

// settled waits until so many nodes have every partition ready so many times in all.
func (b *bed) settled(client *client.Client, nodes, copies int) error {
	for begun := time.Now(); ; {
		within, cancel := context.WithTimeout(b.ctx, 5*time.Second)
		s, err := client.Status(within)
		cancel()
		if err == nil && s.Cluster != nil && len(s.Cluster.Nodes) == nodes && len(s.Cluster.Short) == 0 {
			ready := 0
			for _, n := range s.Cluster.Nodes {
				ready += len(n.Ready)
			}
			if ready == copies*int(b.o.Partitions) {
				return nil
			}
		}
		if b.ctx.Err() != nil {
			return b.ctx.Err()
		}
		if time.Since(begun) > patience {
			return fmt.Errorf("the nodes have not settled within %v: %w", patience, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// client asks any node of a namespace.
func (b *bed) client(namespace string) *client.Client {
	subject := func(op string) string { return jetstream.QuerySubject(namespace, op) }
	return client.OverPool(b.pool, subject, "no node answers", client.Options{})
}

// nodeClient asks one node, which answers for what it holds itself.
func (b *bed) nodeClient(namespace, node string) *client.Client {
	return client.OverPool(b.pool, func(op string) string {
		subject, _ := jetstream.NodeSubject(namespace, node, op) // our nodes' names are good
		return subject
	}, "node "+node+" does not answer", client.Options{})
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
	if _, err := client.Snapshot(within); err != nil {
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

// content is a prompt's blocks: every other prompt is one that all workers hold. The first is how the long prompt
// begins.
func (b *bed) content(worker, n int) (locals []events.LocalHash) {
	if n == 0 {
		q := api.Query{Tokens: longPrompt()[:prompt*blockSize]}
		locals, _ = q.Locals(nil, blockSize, 0) // a good size of blocks
		return locals
	}
	id := uint64(n)
	if n%2 == 1 {
		id |= uint64(worker+1) << 32
	}
	for i := range uint64(prompt) {
		locals = append(locals, events.LocalHash(corpus.Mix(corpus.Mix(id+1)+i)))
	}
	return locals
}

// messages are what a worker's shim publishes.
func (b *bed) messages(worker int) (list [][]byte, err error) {
	batch := events.Batch{Incarnation: 1, FirstID: 1, Model: model, BlockSize: blockSize}
	seal := func() {
		if len(batch.Events) > 0 && err == nil {
			var data []byte
			data, err = events.AppendBatch(nil, &batch)
			list = append(list, data)
			batch.FirstID += events.EventID(len(batch.Events))
			batch.Events = batch.Events[:0]
		}
	}
	for round := range Rounds {
		if round > 0 {
			batch.Events = append(batch.Events, events.Event{Kind: events.Cleared, Reason: events.ReasonOperator})
		}
		for n := range b.o.Blocks / prompt {
			locals := b.content(worker, n)
			for at := 0; at < prompt; at += perEvent {
				e := events.Event{Kind: events.Stored, Tier: events.Device, Attention: events.AttentionFull,
					Locals: locals[at : at+perEvent]}
				for _, l := range e.Locals {
					e.Blocks = append(e.Blocks, events.BlockHash(corpus.Mix(uint64(l))))
				}
				if at > 0 {
					e.HasParent, e.Parent = true, events.BlockHash(corpus.Mix(uint64(locals[at-1])))
				}
				if batch.Events = append(batch.Events, e); len(batch.Events) == perBatch {
					seal()
				}
			}
		}
		seal()
	}
	return list, err
}

// ingest publishes all workers' events and waits until nodes reflect them, each block on so many of them.
func (b *bed) ingest(namespace string, client *client.Client, copies int, nodes ...*process) (t Taken, err error) {
	ns, err := jetstream.OpenNamespace(b.ctx, b.conn, namespace)
	if err != nil {
		return t, err
	}
	pubs, left := make([]*jetstream.Publisher, b.o.Workers), make([][][]byte, b.o.Workers)
	for w := range pubs {
		if pubs[w], err = ns.OpenPublisher(b.ctx, events.RankKey{Instance: events.WorkerID(fmt.Sprint("w", w))},
			jetstream.PublisherOptions{}); err != nil {
			return t, err
		}
		if left[w], err = b.messages(w); err != nil {
			return t, err
		}
	}
	before, err := spent(nodes)
	if err != nil {
		return t, err
	}
	begun := time.Now()
	last := map[events.Partition]events.StreamSeq{}
	for more := true; more; {
		more = false
		for w, pub := range pubs {
			k := min(flight, len(left[w]))
			if k == 0 {
				continue
			}
			seq, err := pub.Publish(b.ctx, left[w][:k])
			if err != nil {
				return t, err
			}
			left[w], more = left[w][k:], true
			last[pub.Partition()] = max(last[pub.Partition()], seq)
		}
	}
	b.filled = last
	if err := b.reflected(namespace, last, len(nodes)); err != nil {
		return t, err
	}
	t.Seconds = time.Since(begun).Seconds()
	after, err := spent(nodes)
	if err != nil {
		return t, err
	}
	t.CPU = max(after-before, time.Millisecond).Seconds()
	t.Blocks = uint64(Rounds * copies * b.o.Workers * (b.o.Blocks / prompt) * prompt)
	t.PerCPU, t.PerSeconds = float64(t.Blocks)/t.CPU, float64(t.Blocks)/t.Seconds
	return t, nil
}

// reflected waits until every replica has applied the log: each node is asked what it has come to.
func (b *bed) reflected(namespace string, last map[events.Partition]events.StreamSeq, nodes int) error {
	names := b.names
	if nodes == 1 {
		names = []string{"one"}
	}
	for _, name := range names {
		own := b.nodeClient(namespace, name)
		for begun := time.Now(); ; time.Sleep(20 * time.Millisecond) {
			within, cancel := context.WithTimeout(b.ctx, 5*time.Second)
			s, err := own.Status(within)
			cancel()
			behind := err != nil
			for i := 0; err == nil && i < len(s.Partitions); i++ {
				behind = behind || s.Partitions[i].Seq < last[s.Partitions[i].Partition]
			}
			if !behind {
				break
			}
			if b.ctx.Err() != nil {
				return b.ctx.Err()
			}
			if time.Since(begun) > patience {
				return fmt.Errorf("node %s has not applied the log within %v: %w", name, patience, err)
			}
		}
	}
	return nil
}

// question is a prompt that all workers hold half of, or one that all hold.
func (b *bed) question(i int) *api.Query {
	prompts := b.o.Blocks / prompt
	n := i % prompts &^ 1
	q := &api.Query{Model: model}
	for _, l := range b.content(0, n) {
		q.Hashes = append(q.Hashes, uint64(l))
	}
	return q
}

// whole is why an answer is not what was published; nil if it is.
func (b *bed) whole(a *api.Answer) error {
	if !a.Complete || len(a.Workers) != b.o.Workers || a.Workers[0].Device != prompt {
		return fmt.Errorf("the answer is not what was published: complete %v, %d workers of %d", a.Complete,
			len(a.Workers), b.o.Workers)
	}
	return nil
}

// heard waits until all nodes have heard where the model's workers are: until so many answers in a row are whole that
// each node gave some of them.
func (b *bed) heard(client *client.Client) error {
	within, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	for inRow := 0; inRow < 100; inRow++ {
		a, err := client.Find(within, b.question(inRow))
		if err == nil {
			err = b.whole(a)
		}
		if err != nil {
			if within.Err() != nil {
				return err
			}
			inRow = 0
			time.Sleep(20 * time.Millisecond)
		}
	}
	return nil
}

// echo starts what answers bare requests: "echo", or one of the relays.
func (b *bed) echo(role string) (*process, error) {
	p, err := b.start("bench", "cluster", "--role", role, "--url", b.url)
	if err != nil {
		return nil, err
	}
	if _, err := p.wait(b.ctx, `ready`); err != nil {
		p.stop()
		return nil, err
	}
	return p, nil
}

// queries asks by turns: a query, and bare requests of the same sizes.
func (b *bed) queries() error {
	echo, err := b.echo("echo")
	if err != nil {
		return err
	}
	defer echo.stop()
	for i := range relays {
		p, err := b.echo("relay" + strconv.Itoa(i))
		if err != nil {
			return err
		}
		defer p.stop()
	}
	var asked, answered int // bytes
	client := b.client("three")
	var query, bare, relayed []time.Duration
	body := make([]byte, 0, 4096)
	for i, lacking := 0, 0; i < b.o.Queries+200; i++ {
		q := b.question(i)
		begun := time.Now()
		a, err := client.Find(b.ctx, q)
		took := time.Since(begun)
		if err != nil {
			return err
		}
		if err := b.whole(a); err != nil {
			if lacking++; a.Complete || lacking > 10 {
				return err
			}
			i-- // a node stood still, and the answer says so: asked again
			continue
		}
		packed, err := api.Marshal(api.MsgPack, q)
		if err != nil {
			return err
		}
		asked = len(packed)
		if packed, err = api.Marshal(api.MsgPack, a); err != nil {
			return err
		}
		answered = len(packed)
		body = append(body[:0], make([]byte, asked)...)
		binary.LittleEndian.PutUint32(body, uint32(answered))
		plain, err := b.timed(echoAt, body, answered)
		if err != nil {
			return err
		}
		twice, err := b.timed(relayAt, body, answered)
		if err != nil {
			return err
		}
		if i >= 200 { // by then connections and caches are warm
			query, bare, relayed = append(query, took), append(bare, plain), append(relayed, twice)
		}
	}
	b.report.Query, b.report.Bare, b.report.Relay = timesOf(query), timesOf(bare), timesOf(relayed)
	b.report.Asked, b.report.Answered = asked, answered
	return nil
}

// timed asks for bytes at a subject, and says how long it took.
func (b *bed) timed(subject string, body []byte, answered int) (time.Duration, error) {
	begun := time.Now()
	reply, err := b.conn.Request(b.ctx, subject, api.MsgPack, body)
	took := time.Since(begun)
	if err == nil && len(reply.Body) != answered {
		err = fmt.Errorf("%s sent %d bytes, not %d", subject, len(reply.Body), answered)
	}
	return took, err
}

// failover kills a node while four clients ask, and waits until every partition has two replicas again.
func (b *bed) failover(client *client.Client, nodes []*process) error {
	lost := 0 // replicas
	before, err := client.Status(b.ctx)
	if err != nil {
		return err
	}
	for _, n := range before.Cluster.Nodes {
		if n.Node == b.names[2] { // nodes[2]
			for _, p := range n.Ready {
				if _, has := b.filled[p]; has { // of others there is nothing to restore
					lost++
				}
			}
		}
	}
	var mu sync.Mutex
	var killed time.Time
	var lastBad, longest time.Duration
	count, bad := 0, 0
	asking, stop := context.WithCancel(b.ctx)
	defer stop()
	var clients sync.WaitGroup
	for c := range 4 {
		clients.Go(func() {
			for i := c; asking.Err() == nil; i++ {
				within, cancel := context.WithTimeout(b.ctx, time.Second)
				begun := time.Now()
				a, err := client.Find(within, b.question(i))
				took := time.Since(begun)
				cancel()
				whole := err == nil && a.Complete && len(a.Workers) == b.o.Workers
				mu.Lock()
				if !killed.IsZero() {
					if count++; !whole {
						bad++
						lastBad = max(lastBad, begun.Sub(killed))
					} else {
						longest = max(longest, took)
					}
				}
				mu.Unlock()
				time.Sleep(time.Millisecond)
			}
		})
	}
	time.Sleep(500 * time.Millisecond)
	mu.Lock()
	killed = time.Now()
	nodes[2].kill()
	mu.Unlock()
	left := b.settled(client, 2, 2)
	redundant := time.Since(killed)
	stop()
	clients.Wait()
	if left != nil {
		return left
	}
	r := &b.report
	r.FailQueries, r.NotWhole, r.WholeAgain, r.FailLongest, r.Redundant = count, bad, lastBad.Seconds(),
		longest.Seconds(), redundant.Seconds()
	var began time.Time
	for begun := time.Now(); ; time.Sleep(10 * time.Millisecond) { // what nodes say is read as it comes
		lines := 0
		if r.Rereplicated, began, lines, err = restored(killed, nodes[:2]...); err != nil {
			return err
		}
		if lines > 0 && lines >= lost {
			break
		}
		if time.Since(begun) > patience {
			return fmt.Errorf("the nodes' log lines tell of %d partitions that were restored, not of %d", lines, lost)
		}
	}
	r.Believed = began.Sub(killed).Seconds()
	return nil
}

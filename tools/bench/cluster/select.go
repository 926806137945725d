package cluster

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/corpus"
)

// SelectOptions configures a measurement of selections.
type SelectOptions struct {
	Program string // the indexer's executable
	// a Python with ai-dynamo-runtime for a comparison with Dynamo's selection service; empty disables the comparison
	Dynamo string

	Workers   int
	Blocks    int // of each prompt; half of the prompts begin with the 64 blocks that half of the workers hold
	Copies    int // of each partition on the three nodes; 3 is the default of indexer serve
	UnderWay  int // number of booked requests at any time
	Callers   int // concurrent callers of a service, over a single connection to NATS
	Decisions int // bookings of a contender in a round
	Rounds    int

	Accounts bool // gives every role a NATS account
}

// SelectDefaults returns the sizes that the goals are about.
func SelectDefaults() SelectOptions {
	return SelectOptions{Workers: 256, Blocks: 512, Copies: 3, UnderWay: 10_000, Callers: 32, Decisions: 3000, Rounds: 5}
}

// Validate returns all faults of the options.
func (o *SelectOptions) Validate() error {
	var errs []error
	for _, c := range []struct {
		name        string
		v           int
		least, most int
	}{
		{"--workers", o.Workers, 2, 4096}, {"--blocks", o.Blocks, overlap, 4096}, {"--under-way", o.UnderWay, 0, 30_000},
		{"--partition-replicas", o.Copies, 1, 3}, {"--callers", o.Callers, 1, 1024},
		{"--decisions", o.Decisions, 100, 30_000}, {"--rounds", o.Rounds, 1, 100},
	} {
		if c.v < c.least || c.v > c.most {
			errs = append(errs, fmt.Errorf("%s %d is not from %d to %d", c.name, c.v, c.least, c.most))
		}
	}
	if o.Dynamo != "" {
		if _, err := os.Stat(o.Dynamo); err != nil {
			errs = append(errs, fmt.Errorf("--dynamo: %w", err))
		}
	}
	return errors.Join(errs...)
}

const overlap = 64 // blocks that half of the prompts share

// SelectReport is the result, with medians over the rounds. The ratios come first, with their goals.
type SelectReport struct {
	SelectP50   float64 `json:"select_p50_ratio"` // three nodes, booked, beside a bare request-reply; at most 2.5
	DecisionP99 float64 `json:"decision_p99_us"`  // match, load and choice in process; at most 60
	Inside      float64 `json:"inside_per_s"`     // booked in process, two at a time; at least 15,000
	HTTPRate    float64 `json:"http_rate_ratio"`  // one node's decisions per second beside Dynamo's; at least 1.5
	NATSRate    float64 `json:"nats_rate_ratio"`  // the same over NATS; at least 3
	HTTPP99     float64 `json:"http_p99_ratio"`   // one node's beside Dynamo's; below 1
	NATSP99     float64 `json:"nats_p99_ratio"`   // the same over NATS; below 1

	// Policies are measured in this process, in turn. DecisionP99, Inside and Stages belong to the first policy.
	Policies []PolicyCost `json:"policies"`
	// Agreements are how far the three nodes agree, by policy.
	Agreements []Agreement `json:"agreements"`

	Asked    int `json:"request_bytes"`
	Answered int `json:"reply_bytes"`

	Select Times   `json:"select"`
	Bare   Times   `json:"bare"`
	Stages []Stage `json:"stages"` // in process

	HTTP   Rate  `json:"http"`
	NATS   Rate  `json:"nats"`
	Dynamo *Rate `json:"dynamo,omitempty"`
}

// PolicyCost is the cost of a policy's selections in this process.
type PolicyCost struct {
	Policy      string  `json:"policy"`
	DecisionP50 float64 `json:"decision_p50_us"` // match, load and choice
	DecisionP99 float64 `json:"decision_p99_us"`
	PerSecond   float64 `json:"per_s"`     // booked, two at a time
	PerCPU      float64 `json:"per_cpu_s"` // the same, per second of processor time
	Stages      []Stage `json:"stages"`
}

// Stage is a part of a choice.
type Stage struct {
	Name string `json:"name"`
	Times
}

// Rate is the speed of a service under concurrent selections and bookings of all callers.
type Rate struct {
	PerSecond float64 `json:"per_s"`
	PerCPU    float64 `json:"per_cpu_s"` // decisions per second of the service's processor time
	Times
}

// RunSelect measures selections. It calls progress with a line for every step.
func RunSelect(ctx context.Context, o SelectOptions, progress func(string)) (r *SelectReport, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	s := &selecting{SelectOptions: o, bed: bed{ctx: ctx, progress: progress, names: nodeNames(8, o.Copies),
		o: Options{Program: o.Program, Workers: o.Workers, Blocks: overlap, Partitions: 8, Accounts: o.Accounts}}}
	if s.dir, err = os.MkdirTemp("", "kvatlas-bench-"); err != nil {
		return nil, err
	}
	defer os.RemoveAll(s.dir)
	server, err := s.connect()
	if err != nil {
		return nil, err
	}
	defer server.stop()
	defer func() { s.users.close() }()
	for _, step := range []struct {
		name string
		do   func() error
	}{{"in process", s.inside}, {"three nodes", s.three}, {"one node", s.one}} {
		progress(step.name)
		if err := step.do(); err != nil {
			return nil, fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return &s.report, nil
}

// selecting is the environment for selections.
type selecting struct {
	bed
	SelectOptions
	report SelectReport
	serial atomic.Int64 // of prompts and request ids
}

// sharedTokens returns the tokens of the shared blocks of half of the prompts. An engine's events with the tokens and a
// prompt with the hashes mean the same blocks.
func sharedTokens() (tokens []uint32) {
	for i := range overlap * blockSize {
		tokens = append(tokens, uint32(i))
	}
	return tokens
}

func sharedBlocks() []events.LocalHash {
	hasher, err := events.NewHasher(blockSize, events.Space{})
	if err != nil {
		panic(err) // the block size is a constant
	}
	return hasher.Hash(nil, sharedTokens())
}

var sharedPrefix = sync.OnceValue(sharedBlocks)

// locals returns the hashes of prompt n. Every second prompt begins with the shared blocks. All other blocks are
// unique.
func (s *selecting) locals(n int64) []events.LocalHash {
	list := make([]events.LocalHash, 0, s.Blocks)
	if n%2 == 0 {
		list = append(list, sharedPrefix()...)
	}
	for i := uint64(0); len(list) < s.Blocks; i++ {
		list = append(list, events.LocalHash(corpus.Mix(corpus.Mix(uint64(n)+1<<40)+i)))
	}
	return list
}

// request returns a new request.
func (s *selecting) request() *api.SelectRequest {
	n := s.serial.Add(1)
	r := &api.SelectRequest{Query: api.Query{Model: model, L3: api.L3Off}, Book: true, RequestID: fmt.Sprint("r", n),
		ISLTokens: uint64(s.Blocks*blockSize + 7)}
	r.Hashes = make(api.Hashes, s.Blocks)
	for i, l := range s.locals(n) {
		r.Hashes[i] = uint64(l)
	}
	return r
}

func worker(i int) events.WorkerID { return events.WorkerID(fmt.Sprintf("w%03d", i)) }

// holding publishes the blocks of half of the workers.
func (s *selecting) holding(ns *jetstream.Namespace) (map[events.Partition]events.StreamSeq, error) {
	e := events.Event{Kind: events.Stored, Tier: events.Device, Attention: events.AttentionFull, Locals: sharedPrefix()}
	for _, l := range e.Locals {
		e.Blocks = append(e.Blocks, events.BlockHash(corpus.Mix(uint64(l))))
	}
	data, err := events.AppendBatch(nil, &events.Batch{Incarnation: 1, FirstID: 1, Model: model, BlockSize: blockSize,
		Events: []events.Event{e}})
	last := map[events.Partition]events.StreamSeq{}
	for i := 0; i < s.Workers/2 && err == nil; i++ {
		var pub *jetstream.Publisher
		if pub, err = ns.OpenPublisher(s.ctx, events.RankKey{Instance: worker(i)}, jetstream.PublisherOptions{}); err != nil {
			break
		}
		var seq events.StreamSeq
		seq, err = pub.Publish(s.ctx, [][]byte{data})
		last[pub.Partition()] = max(last[pub.Partition()], seq)
	}
	return last, err
}

// fill registers the workers, publishes their blocks and books requests on the nodes of a namespace.
func (s *selecting) fill(namespace string, client *client.Client, nodes int) error {
	ns, err := jetstream.OpenNamespace(s.ctx, s.users.as(namespace, natsauth.RolePool).conn, namespace)
	if err != nil {
		return err
	}
	for i := range s.Workers {
		if err := registry.Claim(s.ctx, ns, worker(i), model); err != nil {
			return err
		}
	}
	last, err := s.holding(ns)
	if err != nil {
		return err
	}
	if err := s.reflected(namespace, last, nodes); err != nil {
		return err
	}
	operator := s.clientOf(namespace, natsauth.RoleOperator)
	if err := s.concurrently(s.Workers, func(i int) error {
		// The log contains the blocks, as if shims had announced them, so the nodes must not add guessed blocks.
		w := &api.WorkerRegistration{Instance: worker(i), Model: model, BlockSize: blockSize}
		w.Events, w.Endpoint = api.EventsNone, fmt.Sprintf("http://%s:8000", w.Instance)
		_, err := operator.RegisterWorker(s.ctx, w)
		return err
	}); err != nil {
		return err
	}
	// A run of correct answers proves that every node has the workers and their blocks.
	within, cancel := context.WithTimeout(s.ctx, patience)
	defer cancel()
	for inRow := 0; inRow < 40; inRow++ {
		r := s.request()
		copy(r.Hashes, hashes(sharedPrefix()))
		r.Book, r.RequestID = false, ""
		a, err := client.Select(within, r)
		if err != nil && within.Err() != nil {
			return err
		}
		if err != nil || !a.Complete || a.Candidates != s.Workers || a.Device != overlap {
			inRow = 0
			time.Sleep(20 * time.Millisecond)
		}
	}
	return s.concurrently(s.UnderWay, func(i int) error {
		r := s.request()
		_, err := client.Book(s.ctx, &api.BookRequest{Prompt: r.Prompt(), RequestID: r.RequestID,
			Worker: worker(i % s.Workers), EffectivePrefillTokens: uint64(i % 1000)})
		return err
	})
}

func hashes(locals []events.LocalHash) (list api.Hashes) {
	for _, l := range locals {
		list = append(list, uint64(l))
	}
	return list
}

// concurrently does something n times, a few at the same time, until an error.
func (s *selecting) concurrently(n int, do func(i int) error) error {
	var next atomic.Int64
	var all sync.WaitGroup
	errs := make([]error, s.Callers)
	for c := range s.Callers {
		all.Go(func() {
			for errs[c] == nil && s.ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if errs[c] = do(i); errs[c] != nil {
					next.Store(int64(n))
				}
			}
		})
	}
	all.Wait()
	return errors.Join(append(errs, s.ctx.Err())...)
}

// three measures choices on three nodes by turns with bare requests.
func (s *selecting) three() error {
	var nodes []*process
	defer func() {
		for _, n := range nodes {
			n.kill()
		}
	}()
	for _, id := range s.names {
		n, err := s.node("three", id, "--request-expiry", "10h", "--partition-replicas", fmt.Sprint(s.Copies),
			"--guess-policy", "off", "--http-listen", "127.0.0.1:0")
		if err != nil {
			return err
		}
		nodes = append(nodes, n)
	}
	client := s.client("three")
	if err := s.settled(client, 3, s.Copies); err != nil {
		return err
	}
	if err := s.fill("three", client, 3); err != nil {
		return err
	}
	s.progress("three nodes: compare the choices")
	if err := s.agreements(nodes); err != nil {
		return err
	}
	echo, err := s.start("bench", "cluster", "--role", "echo", "--url", s.echoURL())
	if err != nil {
		return err
	}
	defer echo.stop()
	if _, err := echo.wait(s.ctx, `ready`); err != nil {
		return err
	}
	var ratios []float64
	var all [2][]Times
	for round := range s.Rounds {
		s.progress(fmt.Sprintf("three nodes: round %d", round+1))
		took, bare, err := s.turns(client)
		if err != nil {
			return err
		}
		a, b := timesOf(took), timesOf(bare)
		all[0], all[1] = append(all[0], a), append(all[1], b)
		ratios = append(ratios, a.P50/b.P50)
	}
	s.report.SelectP50, s.report.Select, s.report.Bare = median(ratios), medianTimes(all[0]), medianTimes(all[1])
	return nil
}

// turns books and makes bare requests of the same sizes, by turns.
func (s *selecting) turns(client *client.Client) (took, bare []time.Duration, err error) {
	for i := range s.Decisions + 100 {
		r := s.request()
		begun := time.Now()
		a, err := client.Select(s.ctx, r)
		one := time.Since(begun)
		if err != nil {
			return nil, nil, err
		}
		if !a.Booked || !a.Complete {
			return nil, nil, fmt.Errorf("the answer is not whole: %+v", a)
		}
		asked, err := api.Marshal(api.MsgPack, r)
		if err != nil {
			return nil, nil, err
		}
		answered, err := api.Marshal(api.MsgPack, a)
		if err != nil {
			return nil, nil, err
		}
		s.report.Asked, s.report.Answered = len(asked), len(answered)
		binary.LittleEndian.PutUint32(asked, uint32(len(answered)))
		begun = time.Now()
		reply, err := s.users.bare.conn.Request(s.ctx, echoAt, api.MsgPack, asked)
		plain := time.Since(begun)
		if err != nil {
			return nil, nil, err
		}
		if len(reply.Body) != len(answered) {
			return nil, nil, fmt.Errorf("the echo sent %d bytes, not %d", len(reply.Body), len(answered))
		}
		for {
			err := client.Free(s.ctx, model, r.RequestID)
			if err == nil {
				break
			}
			if s.ctx.Err() != nil {
				return nil, nil, err
			}
		}
		if i >= 100 { // by then connections and caches are warm
			took, bare = append(took, one), append(bare, plain)
		}
	}
	return took, bare, nil
}

func median(list []float64) float64 {
	list = slices.Sorted(slices.Values(list))
	if len(list) == 0 {
		return 0
	}
	return list[len(list)/2]
}

// medianTimes returns the median of every figure.
func medianTimes(list []Times) (t Times) {
	of := func(get func(Times) float64) float64 {
		var v []float64
		for _, x := range list {
			v = append(v, get(x))
		}
		return median(v)
	}
	for _, x := range list {
		t.N += x.N
	}
	t.P50, t.P99, t.Max = of(func(x Times) float64 { return x.P50 }), of(func(x Times) float64 { return x.P99 }),
		of(func(x Times) float64 { return x.Max })
	return t
}

package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// contender is a service for selections and bookings. The bodies of requests are made before the measured time.
type contender struct {
	process *process
	body    func(r *api.SelectRequest) ([]byte, error)
	choose  func(body []byte) error
	free    func(id string) error
	rates   []Rate
}

// rate measures bookings of all callers, and then ends the booked requests.
func (s *selecting) rate(c *contender) error {
	ids, bodies := make([]string, s.Decisions), make([][]byte, s.Decisions)
	for i := range bodies {
		r := s.request()
		ids[i] = r.RequestID
		var err error
		if bodies[i], err = c.body(r); err != nil {
			return err
		}
	}
	took := make([]time.Duration, s.Decisions)
	before, err := spent([]*process{c.process})
	if err != nil {
		return err
	}
	begun := time.Now()
	if err := s.concurrently(s.Decisions, func(i int) error {
		begun := time.Now()
		defer func() { took[i] = time.Since(begun) }()
		return c.choose(bodies[i])
	}); err != nil {
		return err
	}
	all := time.Since(begun)
	after, err := spent([]*process{c.process})
	if err != nil {
		return err
	}
	n := float64(s.Decisions)
	c.rates = append(c.rates, Rate{PerSecond: n / all.Seconds(), PerCPU: n / (after - before).Seconds(),
		Times: timesOf(took)})
	return s.concurrently(s.Decisions, func(i int) error { return c.free(ids[i]) })
}

// result returns the median of every figure.
func (c *contender) result() (r Rate) {
	var times []Times
	var perSecond, perCPU []float64
	for _, x := range c.rates {
		times, perSecond, perCPU = append(times, x.Times), append(perSecond, x.PerSecond), append(perCPU, x.PerCPU)
	}
	return Rate{median(perSecond), median(perCPU), medianTimes(times)}
}

// ratio returns the median ratio of two contenders over the rounds.
func ratio(a, b *contender, get func(Rate) float64) float64 {
	var list []float64
	for i := range a.rates {
		list = append(list, get(a.rates[i])/get(b.rates[i]))
	}
	return median(list)
}

// one alternates between a node with an embedded NATS server, over HTTP and NATS, and Dynamo's selection service.
func (s *selecting) one() error {
	n, err := s.start(append(s.users.flags("single"), "serve", "--data", filepath.Join(s.dir, "one"),
		"--nats-listen", "127.0.0.1:0", "--nats-config", s.users.config, "--namespace", "single", "--node-id", "one",
		"--request-expiry", "10h", "--http-listen", "127.0.0.1:0", "--guess-policy", "off")...)
	if err != nil {
		return err
	}
	defer n.stop()
	var at [2]string
	for i, what := range []string{`HTTP is served" listen=(\S+)`, `NATS server runs in this process" listen=(\S+)`} {
		m, err := n.wait(s.ctx, what)
		if err != nil {
			return err
		}
		at[i] = m[1]
	}
	if _, err := n.wait(s.ctx, `msg=ready`); err != nil {
		return err
	}
	base := "http://" + at[0]
	s.users.close()
	if err := s.join(at[1]); err != nil {
		return err
	}
	client := s.client("single")
	if err := s.fill("single", client, 1); err != nil {
		return err
	}
	http := &poster{client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 2 * s.Callers}}}
	free := func(id string) error { return client.Free(s.ctx, model, id) }
	overHTTP := &contender{process: n, free: free,
		body:   func(r *api.SelectRequest) ([]byte, error) { return json.Marshal(r) },
		choose: func(body []byte) error { return http.do("POST", base+"/v1/select", body) }}
	subject := jetstream.Names("single").Query(ops.Select)
	overNATS := &contender{process: n, free: free,
		body:   func(r *api.SelectRequest) ([]byte, error) { return api.Marshal(api.MsgPack, r) },
		choose: func(body []byte) error { return s.requestOver(subject, body) }}
	list := []*contender{overHTTP, overNATS}
	if s.Dynamo != "" {
		s.progress("Dynamo's selection service")
		dynamo, stop, err := s.dynamo(http)
		if err != nil {
			return fmt.Errorf("the selection service of Dynamo: %w", err)
		}
		defer stop()
		list = append(list, dynamo)
	}
	for round := range s.Rounds {
		s.progress(fmt.Sprintf("single node: round %d", round+1))
		for _, c := range list {
			if err := s.rate(c); err != nil {
				return err
			}
		}
	}
	r := &s.report
	r.HTTP, r.NATS = overHTTP.result(), overNATS.result()
	if len(list) > 2 {
		dynamo := list[2].result()
		r.Dynamo = &dynamo
		perSecond, p99 := func(r Rate) float64 { return r.PerSecond }, func(r Rate) float64 { return r.P99 }
		r.HTTPRate, r.NATSRate = ratio(overHTTP, list[2], perSecond), ratio(overNATS, list[2], perSecond)
		r.HTTPP99, r.NATSP99 = ratio(overHTTP, list[2], p99), ratio(overNATS, list[2], p99)
	}
	return nil
}

// requestOver sends a prepared body as pkg/client does; poster does the same over HTTP.
func (s *selecting) requestOver(subject string, body []byte) error {
	w, pool := waiters.Get().(*waiter), s.users.as("single", natsauth.RoleRouter).pool
	if _, err := pool.Send(subject, api.MsgPack, patience, "", body, w, 0); err != nil {
		return err
	}
	select {
	case r := <-w.replies:
		waiters.Put(w)
		return r.Err
	case <-pool.Lost():
		return rpc.ErrDisconnected
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

// waiter receives a single reply.
type waiter struct{ replies chan rpc.Reply }

func (w *waiter) Receive(_ int, r rpc.Reply) { w.replies <- r }

var waiters = sync.Pool{New: func() any { return &waiter{make(chan rpc.Reply, 1)} }}

// poster makes HTTP requests with JSON bodies.
type poster struct{ client *http.Client }

func (p *poster) do(method, url string, body []byte) error {
	_, err := p.ask(method, url, body)
	return err
}

func (p *poster) ask(method, url string, body []byte) ([]byte, error) {
	r, err := http.NewRequest(method, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", api.JSON)
	reply, err := p.client.Do(r)
	if err != nil {
		return nil, err
	}
	defer reply.Body.Close()
	text, err := io.ReadAll(reply.Body)
	if err == nil && reply.StatusCode/100 != 2 {
		err = fmt.Errorf("%s %s: %s %.300s", method, url, reply.Status, text)
	}
	return text, err
}

// dynamo starts Dynamo's selection service with the same workers and books the running requests. Half of the workers
// have an engine that announces the shared blocks. The other half have a silent engine.
func (s *selecting) dynamo(http *poster) (*contender, func(), error) {
	l, err := net.Listen("tcp", "127.0.0.1:0") // Dynamo accepts no port 0
	if err != nil {
		return nil, nil, err
	}
	addr := l.Addr().String()
	l.Close()
	p := &process{cmd: exec.Command(s.Dynamo, "-m", "dynamo.select_service", "--port",
		addr[strings.LastIndexByte(addr, ':')+1:]), done: make(chan struct{})}
	p.cmd.Env = append(p.cmd.Environ(), "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS=36000")
	if err := p.run(); err != nil {
		return nil, nil, err
	}
	base := "http://" + addr
	var engines []*enginesim.Engine
	stop := func() {
		p.kill()
		for _, e := range engines {
			e.Stop()
		}
	}
	fail := func(err error) (*contender, func(), error) {
		stop()
		return nil, nil, fmt.Errorf("%w; output: %.1000s", err, p.saying())
	}
	if err := s.eventually(func() error { return http.do("GET", base+"/health", nil) }); err != nil {
		return fail(err)
	}
	for range 2 {
		e, err := enginesim.Start(s.ctx, enginesim.Config{BlockSize: blockSize})
		if err != nil {
			return fail(err)
		}
		engines = append(engines, e)
	}
	for i := range s.Workers {
		e := engines[min(i*2/s.Workers, 1)]
		body := fmt.Appendf(nil, `{"worker_id":%d,"model_name":%q,"endpoint":"http://w%d:8000","block_size":%d,`+
			`"kv_events_endpoints":{"0":%q}}`, i+1, model, i, blockSize, e.Endpoint())
		if err := http.do("POST", base+"/workers", body); err != nil {
			return fail(err)
		}
	}
	if err := s.fillDynamo(http, base, engines[0]); err != nil {
		return fail(err)
	}
	if err := s.bookDynamo(http, base); err != nil {
		return fail(err)
	}
	return &contender{process: p, body: s.dynamoBody,
		choose: func(body []byte) error { return http.do("POST", base+"/select_and_reserve", body) },
		free:   func(id string) error { return http.do("DELETE", base+"/reservations/"+id, nil) },
	}, stop, nil
}

// fillDynamo stores the shared blocks in an engine, and waits until Dynamo knows them.
func (s *selecting) fillDynamo(http *poster, base string, engine *enginesim.Engine) error {
	within, cancel := context.WithTimeout(s.ctx, patience)
	defer cancel()
	if err := engine.WaitSubscribers(within, s.Workers/2); err != nil {
		return err
	}
	if _, err := engine.Serve(sharedTokens(), nil); err != nil {
		return err
	}
	shared, err := s.dynamoBody(&api.SelectRequest{Query: api.Query{Hashes: hashes(sharedPrefix())},
		ISLTokens: overlap * blockSize})
	if err != nil {
		return err
	}
	return s.eventually(func() error {
		var scores struct {
			Workers []struct {
				Device int `json:"device_blocks"`
			} `json:"workers"`
		}
		text, err := http.ask("POST", base+"/overlap_scores", shared)
		if err == nil {
			err = json.Unmarshal(text, &scores)
		}
		held := 0
		for _, w := range scores.Workers {
			held += w.Device
		}
		if err == nil && held != s.Workers/2*overlap {
			err = fmt.Errorf("the workers hold %d blocks, not %d", held, s.Workers/2*overlap)
		}
		return err
	})
}

// bookDynamo books the running requests.
func (s *selecting) bookDynamo(http *poster, base string) error {
	return s.concurrently(s.UnderWay, func(i int) error {
		r := s.request()
		body, err := json.Marshal(map[string]any{"model_name": model, "selection_id": r.RequestID,
			"worker_id": 1 + i%s.Workers, "dp_rank": 0, "sequence_hashes": signed(sequence(r)), "isl_tokens": r.ISLTokens,
			"effective_prefill_tokens": i % 1000})
		if err != nil {
			return err
		}
		return http.do("POST", base+"/reservations", body)
	})
}

// dynamoBody returns a request in Dynamo's form, with sequence hashes, which Dynamo does not compute.
func (s *selecting) dynamoBody(r *api.SelectRequest) ([]byte, error) {
	body := map[string]any{"model_name": model, "block_hashes": signed(r.Hashes),
		"sequence_hashes": signed(sequence(r)), "isl_tokens": r.ISLTokens}
	if r.RequestID != "" {
		body["selection_id"] = r.RequestID
	}
	return json.Marshal(body)
}

func sequence(r *api.SelectRequest) (list []uint64) {
	var locals []events.LocalHash
	for _, h := range r.Hashes {
		locals = append(locals, events.LocalHash(h))
	}
	for _, h := range events.SeqHashes(nil, locals) {
		list = append(list, uint64(h))
	}
	return list
}

func signed(list []uint64) []int64 {
	out := make([]int64, len(list))
	for i, v := range list {
		out[i] = int64(v)
	}
	return out
}

// eventually tries again until there is no error.
func (s *selecting) eventually(do func() error) error {
	for begun := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		err := do()
		if err == nil || s.ctx.Err() != nil || time.Since(begun) > patience {
			return err
		}
	}
}

package gateway

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"io"
	mathrand "math/rand/v2"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/text/fields"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
	"google.golang.org/grpc"
)

// Bookings books requests on workers. [api.Router] implements it.
type Bookings interface {
	Book(ctx context.Context, r *api.BookRequest) (*api.Booking, error)
	PrefillComplete(ctx context.Context, r *api.RequestRef) error
	Progress(ctx context.Context, r *api.RequestRef) error
	Free(ctx context.Context, r *api.RequestRef) error
	EngineLoad(ctx context.Context, l *api.EngineLoads) error
}

// Tenants names the tenants of requests. [tenants.Names] implements it.
type Tenants interface {
	// With adds the tenant in a request's headers to a context.
	With(ctx context.Context, header func(name string) string) context.Context
	// Of returns the name of a request's tenant; empty: none.
	Of(ctx context.Context, salt, adapter string) string
}

// unnamed attributes no request.
type unnamed struct{}

func (unnamed) With(ctx context.Context, _ func(string) string) context.Context { return ctx }
func (unnamed) Of(context.Context, string, string) string                       { return "" }

// Config configures the router, the registry and the bounds of a Service. Router, Pool, All and Resolve are required.
type Config struct {
	Select   func(ctx context.Context, r *api.SelectRequest) (*api.Selection, error)
	Bookings Bookings
	Pool     func(model string) *registry.Pool
	All      func() []registry.ModelRank

	// Resolve returns the model and adapter for a model name in a request. Its error is an [api.Error].
	Resolve func(name string) (registry.Target, error)

	// Estimates estimates the length of prompts without tokens, and learns from the numbers of the engines. The default
	// is an Estimator of the Service alone.
	Estimates *fields.Estimator

	Text bool // Select tokenizes texts; without it, requests with a text are chosen by load

	// Templates means that Select runs chat templates of requests. Otherwise requests with a template are chosen by
	// load. vLLM also refuses chat templates in requests by default.
	Templates bool

	// ForwardTokens replaces the text of a completion by token ids, so that the engine need not tokenize it again.
	ForwardTokens bool

	// Transfer makes the gateway send requests to prefill workers itself. nil: only the header of llm-d's sidecar and
	// SGLang's fields describe the prefill worker. Prefill workers with a bootstrap port have SGLang's fields in any case.
	Transfer *Transfer

	Fallbacks int   // number of fallback workers beside the chosen one; default 2
	MaxBodies int64 // bound on the bodies in memory, in bytes; default 64 MiB

	// Expiry is the time without progress after which Bookings forgets a request; default 300 s. The service reports
	// progress of each request four times within it while the stream is open.
	Expiry time.Duration

	// Bind binds a session to the rank of a booked request. The gateway binds the id of each response of the Responses
	// API: only the rank's engine has the response, and later requests may continue it. nil disables sessions.
	Bind func(model, session string, rank events.RankKey, requestID string)

	Tenants Tenants // nil: requests are not attributed

	Metrics Metrics // required
}

// Metrics counts the events of a [Service]. Any goroutine may call its methods.
type Metrics interface {
	// ReportReused records the reused tokens of a prompt, as the engine reported them. alone means that the chosen
	// prefill worker did not compute the prompt, so the decode worker did.
	ReportReused(requestID string, tokens uint64, alone bool)

	ReportAnswer(requestID string, tokens uint64) // records the tokens of a complete answer
	Moved(model string)                           // counts an answer of another worker than the chosen one

	// Prefilled counts a request to a prefill worker by its [PrefillOutcome]. took is its time with the wait for a place;
	// 0: it was not sent.
	Prefilled(model, outcome string, took time.Duration)

	// Unsupported receives the fields that prevent a look-up of a request. The list may be empty. Select counts the
	// fields without support in the source of tokens.
	Unsupported(api string, names []string)

	// TokenizationAvoided counts a request with token ids in place of its text, which the engine does not tokenize, and
	// the time in which the tokenizer of this node made the tokens.
	TokenizationAvoided(model string, tokens int, took time.Duration)

	// PromptCompared counts a complete answer by the estimated tokens of all its prompts, and by the numbers of the
	// engine. It is called only if the estimate and the prompt's actual number are known.
	PromptCompared(model string, estimated, actual, completion uint64)
}

// Service is the external processor. It serves any number of streams concurrently.
type Service struct {
	extprocv3.UnimplementedExternalProcessorServer
	cfg    Config
	bodies *web.Intake
	known  sync.Map // model → *places

	transfer *transfer // nil without Config.Transfer
}

// New returns a service.
func New(cfg Config) *Service {
	cfg.Fallbacks = cmp.Or(cfg.Fallbacks, 2)
	cfg.MaxBodies = cmp.Or(cfg.MaxBodies, 64<<20)
	cfg.Expiry = cmp.Or(cfg.Expiry, 300*time.Second)
	cfg.Estimates = cmp.Or(cfg.Estimates, &fields.Estimator{})
	if cfg.Tenants == nil {
		cfg.Tenants = unnamed{}
	}
	bodies := &web.Intake{Most: cfg.MaxBodies}
	return &Service{cfg: cfg, bodies: bodies, transfer: newTransfer(cfg.Transfer, bodies)}
}

// freeing bounds the time of the calls that free a request after its stream has ended.
const freeing = 5 * time.Second

// Process serves one HTTP request.
func (s *Service) Process(stream grpc.BidiStreamingServer[extprocv3.ProcessingRequest, extprocv3.ProcessingResponse],
) error {
	ctx := stream.Context()
	m := NewMachine()
	var b booking
	var up upload
	defer func() {
		up.end()
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), freeing)
		defer cancel()
		s.load(ending, &b, m.End())
	}()
	for {
		// A proxy cancels the stream when its client disconnects. After the choice, this is a normal end.
		answered := m.Answered()
		r, err := up.receive(stream)
		if errors.Is(err, io.EOF) || answered && ctx.Err() != nil {
			return nil
		}
		failure, slow := errors.AsType[*api.Error](err)
		if err != nil && !slow {
			return err
		}
		if h := r.GetRequestHeaders(); h != nil {
			ctx = s.cfg.Tenants.With(ctx, func(name string) string { return header(h, name) })
		}
		var e Effects
		if !slow {
			e = m.Step(r)
			failure = up.add(s.bodies, m.Held())
		}
		if failure != nil {
			e = m.Refuse(failure)
		}
		for {
			s.load(ctx, &b, e)
			for _, reply := range e.Replies {
				if err := stream.Send(reply); err != nil && answered && ctx.Err() != nil {
					return nil
				} else if err != nil {
					return err
				}
			}
			if e.Err != nil {
				return e.Err
			}
			if slow {
				return nil // the goroutine discards its message
			}
			if e.Ask == nil {
				break
			}
			up.complete()
			var c *Choice
			if c, b, err = s.choose(ctx, e.Ask); err != nil {
				e = m.Refuse(err)
			} else {
				e = m.Chosen(c)
			}
			up.end()
		}
	}
}

// upload is the body that a stream reads. The zero value is empty.
type upload struct {
	arrival *web.Arrival
	held    int
	gone    chan struct{} // closed if the body has to make room for others
}

// receive returns the stream's next message. Its error is an [api.Error] if the body has to make room meanwhile. Then
// the stream must end.
func (u *upload) receive(stream grpc.BidiStreamingServer[extprocv3.ProcessingRequest, extprocv3.ProcessingResponse],
) (*extprocv3.ProcessingRequest, error) {
	if u.arrival == nil {
		return stream.Recv()
	}
	type message struct {
		r   *extprocv3.ProcessingRequest
		err error
	}
	next := make(chan message, 1)
	go func() {
		r, err := stream.Recv()
		next <- message{r, err}
	}()
	select {
	case m := <-next:
		return m.r, m.err
	case <-u.gone:
		return nil, u.arrival.Add(0)
	}
}

// add counts the buffered bytes of the body.
func (u *upload) add(bodies *web.Intake, held int) *api.Error {
	if held <= u.held {
		return nil
	}
	if u.arrival == nil {
		gone := make(chan struct{})
		u.gone, u.arrival = gone, bodies.Begin(func() { close(gone) })
	}
	more := held - u.held
	u.held = held
	return u.arrival.Add(more)
}

// complete marks the body as received: it still counts, and does not make room for others.
func (u *upload) complete() {
	if u.arrival != nil {
		_ = u.arrival.Complete() // a body that was aborted at this moment is complete, and is served
	}
}

// end removes the body from the counts.
func (u *upload) end() {
	if u.arrival != nil {
		u.arrival.End()
	}
	*u = upload{}
}

// booking is a request with a counted load. The zero value is no booking.
type booking struct {
	ref    api.RequestRef
	prompt api.Prompt // kept until the answering worker is known
	rank   events.RankKey

	chosen string // id of the choice; ref has another id after a move
	report string // id for the report of reused tokens; empty: reported
	alone  bool   // the decode worker computes the prompt, because the prefill worker did not

	prefill uint64 // tokens that the chosen worker computes, if another worker answers: without its reuse

	estimated uint64        // tokens of all prompts; 0: unknown, or the estimate covers only a part
	length    fields.Length // of all prompts, with estimated

	alive *renewal
}

// renewal reports progress of a request until stop is called. nil reports nothing.
type renewal struct {
	report func() error
	period time.Duration

	mu    sync.Mutex
	timer *time.Timer // nil after stop
}

// renew starts the reports of a request's progress.
func (s *Service) renew(ctx context.Context, ref api.RequestRef) *renewal {
	r := &renewal{period: s.cfg.Expiry / 4, report: func() error { return s.cfg.Bookings.Progress(ctx, &ref) }}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.timer = time.AfterFunc(r.period, r.run)
	return r
}

func (r *renewal) run() {
	_ = r.report() // the booking may have ended with its worker
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.timer != nil {
		r.timer.Reset(r.period)
	}
}

func (r *renewal) stop() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.timer != nil {
		r.timer.Stop()
		r.timer = nil
	}
}

// load reports progress of a booking. A booking may be missing because of its age or because its worker is gone. This
// is not an error.
func (s *Service) load(ctx context.Context, b *booking, e Effects) {
	if b.ref.RequestID == "" {
		return
	}
	if len(e.Failed) > 0 {
		s.failed(ctx, b.ref.Model, e.Failed)
	}
	if e.Served != "" {
		s.move(ctx, b, e.Served)
	}
	if e.PrefillComplete {
		_ = s.cfg.Bookings.PrefillComplete(ctx, &b.ref)
	}
	if e.Reported && b.report != "" {
		s.cfg.Metrics.ReportReused(b.report, e.CachedTokens, b.alone)
	}
	if e.ResponseID != "" && s.cfg.Bind != nil {
		s.cfg.Bind(b.ref.Model, e.ResponseID, b.rank, b.ref.RequestID)
	}
	if e.PromptTokens > 0 {
		s.cfg.Metrics.ReportAnswer(b.chosen, e.CompletionTokens)
	}
	if e.PromptTokens > 0 && b.estimated > 0 {
		s.cfg.Metrics.PromptCompared(b.ref.Model, b.estimated, e.PromptTokens, e.CompletionTokens)
		s.cfg.Estimates.Learn(b.ref.Model, &b.length, e.PromptTokens)
	}
	if e.Free {
		b.alive.stop()
		b.ref.Result = e.Result
		_ = s.cfg.Bookings.Free(ctx, &b.ref)
		b.ref.RequestID = ""
	}
}

// failed reports failures of the workers at some addresses.
func (s *Service) failed(ctx context.Context, model string, addresses []string) {
	var l api.EngineLoads
	ranks := s.cfg.Pool(model).Ranks
	for i := range ranks {
		r := &ranks[i]
		if slices.Contains(addresses, address(r.Record.Endpoint)) &&
			!slices.ContainsFunc(l.Results, func(f api.WorkerResult) bool { return f.Worker == r.Instance }) {
			l.Results = append(l.Results, api.WorkerResult{Worker: r.Instance, Result: api.ResultRefused})
		}
	}
	_ = s.cfg.Bookings.EngineLoad(ctx, &l)
}

// move books a request on the answering worker instead of the chosen one.
func (s *Service) move(ctx context.Context, b *booking, to string) {
	s.cfg.Metrics.Moved(b.ref.Model)
	ranks := s.cfg.Pool(b.ref.Model).Ranks
	at := slices.IndexFunc(ranks, func(r registry.PoolRank) bool { return address(r.Record.Endpoint) == to })
	if at < 0 { // not a worker of the registry
		b.alive.stop()
		_ = s.cfg.Bookings.Free(ctx, &b.ref)
		b.ref.RequestID = ""
		return
	}
	s.rebook(ctx, b, ranks[at].RankKey, b.prefill)
	b.report = b.ref.RequestID
}

// rebook ends a booking and books the request at a rank, under another id.
func (s *Service) rebook(ctx context.Context, b *booking, at events.RankKey, prefill uint64) {
	b.alive.stop()
	_ = s.cfg.Bookings.Free(ctx, &b.ref)
	b.ref.RequestID, b.rank = rand.Text(), at
	_, _ = s.cfg.Bookings.Book(ctx, &api.BookRequest{Prompt: b.prompt, RequestID: b.ref.RequestID,
		Worker: at.Instance, Rank: at.Rank, EffectivePrefillTokens: prefill})
	b.alive = s.renew(ctx, b.ref)
}

// choose chooses a worker, and books the request there if the model is known.
func (s *Service) choose(ctx context.Context, a *Ask) (*Choice, booking, error) {
	if len(a.Body) == 0 {
		c, err := s.anyWorker(a)
		return c, booking{}, err
	}
	r, err := fields.Read(a.API, a.Body)
	if err != nil {
		return nil, booking{}, err
	}
	q := &api.SelectRequest{RequestID: rand.Text(), Book: true}
	q.Model, q.Explain = r.Model, true
	known, err := s.serving(q)
	if err != nil {
		return nil, booking{}, err
	}
	if !known {
		r.Unsupported = append(r.Unsupported, "model")
	}
	q.LoRA = cmp.Or(q.LoRA, r.LoRA)
	q.Tenant = s.cfg.Tenants.Of(ctx, r.Salt, q.LoRA)
	if s.cfg.Bind != nil && len(r.Previous) <= api.MaxSessionID {
		q.SessionID = r.Previous
	}
	if r.Text.HasTemplate() && !s.cfg.Templates {
		r.Unsupported = append(r.Unsupported, "chat_template")
	}
	switch {
	case !r.Prompted() || r.Tokens == nil && !s.cfg.Text:
		q.Unsupported = len(r.Unsupported) > 0
		// A salt requires tokens. The adapter restricts the candidates.
		q.ISLTokens = max(1, s.cfg.Estimates.Tokens(q.Model, &r.Length))
		s.cfg.Metrics.Unsupported(string(r.API), r.Unsupported)
	case r.Tokens != nil:
		q.Tokens, q.CacheSalt = r.Tokens, r.Salt
		if further := s.cfg.Estimates.Tokens(q.Model, &r.Further); further > 0 {
			q.ISLTokens = uint64(len(r.Tokens)) + further
		}
	default:
		q.Text, q.CacheSalt, q.ISLTokens = &r.Text, r.Salt, s.cfg.Estimates.Tokens(q.Model, &r.Further)
	}
	forward := s.cfg.ForwardTokens && q.Text == &r.Text && a.API == fields.Completions && q.LoRA == ""
	r.Text.ReturnTokenIDs = forward
	if q.Endpoints, err = s.allowed(q.Model, a.Subset); err != nil {
		return nil, booking{}, err
	}
	form := s.form(q.Model, r, a.Body)
	q.Disaggregated, q.PrefillOptional = form.pair(), form.pair()
	chosen, err := s.cfg.Select(ctx, q)
	if err != nil {
		return nil, booking{}, err
	}
	b := booking{ref: api.RequestRef{Model: q.Model, RequestID: q.RequestID}, chosen: q.RequestID, report: q.RequestID,
		prompt: q.Prompt(), rank: events.RankKey{Instance: chosen.Worker, Rank: chosen.Rank}}
	b.prompt.ISLTokens = chosen.ISLTokens
	if chosen.Prefill == nil {
		b.prefill = chosen.ISLTokens
	}
	if !r.Partial {
		b.estimated, b.length = chosen.ISLTokens, r.Length
	}
	if t := chosen.Tokenization; t != nil {
		r.Unsupported = t.UnsupportedFields
	}
	c := s.choice(chosen, a.Subset, form)
	if c == nil {
		_ = s.cfg.Bookings.Free(ctx, &b.ref)
		return nil, booking{}, api.Errorf(api.CodeNoWorkers,
			"the chosen worker of %q has left its permitted address", q.Model)
	}
	c.Unsupported = r.Unsupported
	if forward {
		c.Body = s.forward(a.Body, chosen)
	}
	b.alive = s.renew(ctx, b.ref)
	if form.own() {
		if err := s.prefill(ctx, a, r.API, form, chosen, c, &b); err != nil {
			return nil, booking{}, err
		}
	} else if met := s.bootstrapped(c, chosen.Prefill, c.body(a), r.Prompts); met != nil {
		c.Body = met
	}
	return c, b, nil
}

// serving replaces the model name in the request by the model, and the adapter, behind the name. A request without a
// model name means the only registered model. An unknown name means it too, because engines accept names that are not
// registered. serving then returns false: the name may be an adapter's, so the blocks are unknown.
func (s *Service) serving(q *api.SelectRequest) (known bool, err error) {
	if q.Model != "" {
		t, err := s.cfg.Resolve(q.Model)
		if err != nil || len(s.cfg.Pool(t.Model).Ranks) > 0 {
			q.Model, q.LoRA = t.Model, t.LoRA
			return true, err
		}
		if base, lora, is := strings.Cut(q.Model, ":"); is && len(s.cfg.Pool(base).Ranks) > 0 {
			q.Model, q.LoRA = base, strings.TrimSpace(lora) // SGLang's form of a model with an adapter
			return true, nil
		}
	}
	only := ""
	for _, r := range s.cfg.All() {
		if only != "" && only != r.Model {
			if q.Model != "" {
				return true, nil // select refuses the name
			}
			return false, api.Errorf(api.CodeMissingModel, "the request names no model, and there are several")
		}
		only = r.Model
	}
	if only == "" && q.Model == "" {
		return false, api.Errorf(api.CodeNoWorkers, "no worker is registered")
	}
	known = q.Model == "" || only == ""
	q.Model = cmp.Or(only, q.Model)
	return known, nil
}

// places are the addresses of a pool's ranks. It is immutable.
type places struct {
	pool      *registry.Pool
	endpoints []string // serving addresses that proxies can reach, in their registered form, without duplicates
	addresses []string // the IP:PORT of each endpoint
	all       bool     // the pool has no other addresses
	decode    bool     // the pool has decode workers, so requests may have a prefill worker
	bootstrap bool     // a prefill worker has a bootstrap port, so the engines are SGLang's
}

// places returns the addresses of a model. A change of the pool recomputes the addresses.
func (s *Service) places(model string) *places {
	pool := s.cfg.Pool(model)
	known, _ := s.known.Load(model)
	if at, _ := known.(*places); at != nil && at.pool == pool {
		return at
	}
	at := &places{pool: pool, all: true}
	seen := map[string]bool{}
	for i := range pool.Ranks {
		record := pool.Ranks[i].Record
		endpoint := record.Endpoint
		at.decode = at.decode || record.Role == api.RoleDecode
		at.bootstrap = at.bootstrap || record.Role == api.RolePrefill && record.BootstrapPort != 0
		if seen[endpoint] {
			continue
		}
		seen[endpoint] = true
		if a := address(endpoint); a == "" {
			at.all = false
		} else {
			at.endpoints, at.addresses = append(at.endpoints, endpoint), append(at.addresses, a)
		}
	}
	if len(pool.Ranks) > 0 { // unknown names must not fill the map
		s.known.Store(model, at)
	} else {
		s.known.Delete(model)
	}
	return at
}

// allowed returns the registered serving addresses of the permitted ranks of a model: addresses in the subset that
// proxies can reach. nil permits all.
func (s *Service) allowed(model string, subset []string) (list []string, err error) {
	at := s.places(model)
	switch {
	case len(at.pool.Ranks) == 0:
		return nil, nil // select reports the unknown model
	case len(at.endpoints) == 0:
		return nil, api.Errorf(api.CodeNoWorkers, "no worker of %q is registered with a serving address IP:PORT", model)
	case subset == nil && at.all:
		return nil, nil
	case subset == nil:
		return at.endpoints, nil
	}
	for i, a := range at.addresses {
		if slices.Contains(subset, a) {
			list = append(list, at.endpoints[i])
		}
	}
	if list == nil {
		return nil, api.Errorf(api.CodeNoWorkers, "no worker of %q has an address of the proxy's subset: %.200s", model,
			strings.Join(subset, ","))
	}
	return list, nil
}

// choice returns the destination of a booked request: the chosen worker, and the next best workers of the subset. It
// returns nil if a chosen worker has left its permitted address by a new registration.
func (s *Service) choice(of *api.Selection, subset []string, form prefillForm) *Choice {
	usable := func(endpoint string) string {
		at := address(endpoint)
		if subset != nil && !slices.Contains(subset, at) {
			return ""
		}
		return at
	}
	chosen := usable(of.Endpoint)
	if chosen == "" {
		return nil
	}
	pool := s.cfg.Pool(of.Model)
	c := &Choice{Addresses: []string{chosen}}
	rank, ranks := serverRank(pool.Worker(of.Worker), of.Rank, chosen)
	if ranks > 1 {
		c.Rank = strconv.FormatUint(uint64(rank), 10)
	}
	source := of.KVSource
	if p := of.Prefill; p != nil {
		if c.Prefiller = usable(p.Endpoint); c.Prefiller == "" {
			return nil
		}
		r, n := serverRank(pool.Worker(p.Worker), p.Rank, c.Prefiller)
		if form.own() && n > 1 {
			c.prefillRank = strconv.FormatUint(uint64(r), 10)
		} else if !form.own() && r != rank {
			c.Rank = "" // sidecars send the header to both servers
		}
		source = p.KVSource // the prefill worker fetches the blocks
	}
	if source != nil {
		c.Source = soleAddress(pool.Worker(source.Worker), source.Endpoint)
	}
	if of.Explanation == nil {
		return c
	}
	others := of.Explanation.Candidates
	slices.SortStableFunc(others, func(a, b routing.Considered) int { return cmp.Compare(a.Cost, b.Cost) })
	for i := range others {
		if len(c.Addresses) > s.cfg.Fallbacks {
			break
		}
		r := pool.Rank(events.RankKey{Instance: others[i].Worker, Rank: others[i].Rank})
		if r == nil {
			continue // the registration has ended
		}
		if at := usable(r.Record.Endpoint); at != "" && !slices.Contains(c.Addresses, at) {
			c.Addresses = append(c.Addresses, at)
		}
	}
	return c
}

// serverRank returns the rank as the server at its address counts, and the number of the server's ranks. Each of
// several servers of a worker counts its own ranks (vllm-project/vllm › vllm/v1/engine/input_processor.py: with hybrid
// and external load balancing a rank must be less than data_parallel_size_local).
func serverRank(worker []registry.PoolRank, rank events.Rank, at string) (of events.Rank, here int) {
	first := rank
	for i := range worker {
		if address(worker[i].Record.Endpoint) == at {
			first = min(first, worker[i].Rank)
			here++
		}
	}
	if here < len(worker) {
		rank -= first
	}
	return rank, here
}

// soleAddress returns the IP:PORT of a serving address with a single rank behind it; empty for other addresses. The
// header of a KV source has no rank.
func soleAddress(worker []registry.PoolRank, endpoint string) string {
	here := 0
	for i := range worker {
		if worker[i].Record.Endpoint == endpoint {
			here++
		}
	}
	if here != 1 {
		return ""
	}
	return address(endpoint)
}

// anyWorker chooses for a request without a model: any permitted worker, with fallbacks.
func (s *Service) anyWorker(a *Ask) (*Choice, error) {
	c := &Choice{}
	for _, r := range s.cfg.All() {
		at := address(r.Record.Endpoint)
		if at != "" && r.Record.State == api.WorkerSchedulable && routing.Role(r.Record.Role).Answers() &&
			(a.Subset == nil || slices.Contains(a.Subset, at)) &&
			!slices.Contains(c.Addresses, at) {
			c.Addresses = append(c.Addresses, at)
		}
	}
	if len(c.Addresses) == 0 {
		return nil, api.Errorf(api.CodeNoWorkers, "no worker may be chosen: see `indexer workers`")
	}
	mathrand.Shuffle(len(c.Addresses), func(i, j int) {
		c.Addresses[i], c.Addresses[j] = c.Addresses[j], c.Addresses[i]
	})
	c.Addresses = c.Addresses[:min(len(c.Addresses), 1+s.cfg.Fallbacks)]
	return c, nil
}

// address returns the IP:PORT of a serving address. The result is empty without an IP:PORT, and for an address that a
// proxy must not use, such as a cloud's metadata service.
func address(endpoint string) string {
	host := endpoint
	port := "80"
	if scheme, _, isURL := strings.Cut(endpoint, "://"); isURL {
		u, err := url.Parse(endpoint)
		if err != nil {
			return ""
		}
		host = u.Host
		if scheme == "https" {
			port = "443"
		}
	}
	if at, err := netip.ParseAddrPort(host); err == nil && !dial.Never(at.Addr()) {
		return at.String()
	}
	if at, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil && !dial.Never(at) {
		return net.JoinHostPort(at.String(), port)
	}
	return ""
}

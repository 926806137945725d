package gateway

import (
	"cmp"
	"context"
	"errors"
	"io"
	"sync"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/text/fields"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
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

	// ByLoad is called for each request with a text that is chosen by load because Text is false. nil disables the call.
	ByLoad func(model string)

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

	// Expiry is the time without progress after which Bookings forgets a request; default [load.DefaultExpiry]. The
	// service reports progress of each request four times within Expiry while the stream is open.
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
	cfg.Expiry = cmp.Or(cfg.Expiry, load.DefaultExpiry)
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

package compat

import (
	"cmp"
	"context"
	"encoding/json"
	"math"
	"slices"
	"strconv"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Plane answers requests to Dynamo's KV router over the request plane (ai-dynamo/dynamo › lib/kv-router, RouterRequest
// and RouterResponse), in all three generations:
//
//	{"tokens":[…]}                                   → {"worker_id":7}
//	{"method":"new","tokens":[…]}                    → {"method":"new","worker_id":7,"dp_rank":0,"overlap_blocks":3}
//	{"method":"mark_prefill"}, {"method":"mark_free"} → {"method":"prefill_marked","success":true}, …"free_marked"…
//	{"method":"potential_loads","tokens":[…]}        → {"method":"potential_loads","loads":[…],"pending_count":0,…}
//
// Bodies are JSON. As in Dynamo, unknown fields are ignored, and the transport's id replaces a missing request_id. A
// request without an id and a request of the earliest form are not booked, because no later request could end the
// booking.
type Plane struct {
	Router api.Router

	// BlockSize returns the block size of a model's workers in tokens. The result is 0 without workers and with several
	// block sizes. Only prompts with multimodal items need the size.
	BlockSize func(model string) uint32

	// Resolve resolves an alias to a model. nil disables aliases.
	Resolve registry.Resolver
}

// planeRequest has the fields of all requests.
type planeRequest struct {
	method, request string
	tokens          api.Tokens
	media           []*media
	lora, salt      string
	jump            float64 // of the queue priority
	strict          uint32
	constraints     struct {
		Required  []string           `json:"required_taints"`
		Preferred map[string]float64 `json:"preferred_taints"`
	}
}

// planeWords builds the errors of requests to Dynamo's router.
var planeWords = Words{
	Twice: func(name string) error { return api.Errorf(api.CodeMalformed, "%s is given twice", name) },
	Wrong: wrong,
}

func readPlane(body []byte) (*planeRequest, error) {
	r := &planeRequest{}
	err := ReadFields(body, &planeWords,
		Field{"method", &r.method, Optional, "text"}, Field{"request_id", &r.request, Optional, "text"},
		Field{"tokens", &r.tokens, Optional, ""}, Field{"lora_name", &r.lora, Optional, "text"},
		Field{"cache_namespace", &r.salt, Optional, "text"}, Field{"block_mm_infos", &r.media, Optional, wantMedia},
		Field{"routing_constraints", &r.constraints, Optional, "required_taints and preferred_taints"},
		Field{"priority_jump", &r.jump, Optional, "a number"},
		Field{"strict_priority", &r.strict, Optional, "an unsigned 32-bit number"})
	if err != nil {
		_, failed := statusOf(err)
		return nil, failed
	}
	if (r.method == "" || r.method == "new" || r.method == "potential_loads") && r.tokens == nil {
		return nil, api.Errorf(api.CodeMalformed, "tokens is missing")
	}
	return r, nil
}

type planeChoice struct {
	Method  string      `json:"method,omitempty"`
	Worker  ID          `json:"worker_id"`
	Rank    events.Rank `json:"dp_rank"`
	Overlap uint32      `json:"overlap_blocks"` // weighted over all tiers, and rounded
}

type planeRejected struct {
	Method    string          `json:"method"`
	Rejection *QueueRejection `json:"rejection"`
}

type planeMarked struct {
	Method  string `json:"method"`
	Success bool   `json:"success"`
}

type planeLoads struct {
	Method  string      `json:"method"`
	Loads   []planeLoad `json:"loads"`
	Pending int         `json:"pending_count"`
	ISL     uint64      `json:"pending_isl_tokens"`
}

type planeLoad struct {
	Worker   ID          `json:"worker_id"`
	Rank     events.Rank `json:"dp_rank"`
	Prefill  uint64      `json:"potential_prefill_tokens"`
	Decode   uint64      `json:"potential_decode_blocks"`
	Requests uint64      `json:"active_requests"`
}

// planeSelection is Dynamo's WorkerSelectionResult.
type planeSelection struct {
	Worker   any    `json:"worker_id"` // an int64, or an id that is none
	Required uint64 `json:"required_blocks"`
	Overlap  uint32 `json:"overlap_blocks"` // on the device
}

// Answer answers a request for a model. requestID is the id from the transport, or "".
func (p *Plane) Answer(ctx context.Context, model, requestID string, body []byte) ([]byte, *api.Error) {
	return reply(func() (any, error) {
		r, err := readPlane(body)
		if err != nil {
			return nil, err
		}
		ref := &api.RequestRef{Model: model, RequestID: cmp.Or(r.request, requestID)}
		switch r.method {
		case "":
			s, err := p.choose(ctx, model, "", r)
			if err != nil {
				return nil, err
			}
			return map[string]ID{"worker_id": ID(s.Worker)}, nil
		case "new":
			s, err := p.choose(ctx, model, ref.RequestID, r)
			if err != nil {
				if why := NewQueueRejection(err); why != nil {
					return &planeRejected{"queue_rejected", why}, nil
				}
				return nil, err
			}
			return &planeChoice{"new", ID(s.Worker), s.Rank, uint32(math.Round(s.EffectiveOverlap))}, nil
		case "mark_prefill":
			ok, err := marked(ctx, ref, p.Router.PrefillComplete)
			return &planeMarked{"prefill_marked", ok}, err
		case "mark_free":
			ok, err := marked(ctx, ref, p.Router.Free)
			return &planeMarked{"free_marked", ok}, err
		case "potential_loads":
			return p.loads(ctx, model, r)
		}
		return nil, api.Errorf(api.CodeMalformed,
			"method is %.40q; it is new, mark_prefill, mark_free or potential_loads", r.method)
	})
}

// Select answers a request of the first two generations with a WorkerSelectionResult. Select books nothing.
func (p *Plane) Select(ctx context.Context, model string, body []byte) ([]byte, *api.Error) {
	return reply(func() (any, error) {
		r, err := readPlane(body)
		if err != nil {
			return nil, err
		}
		if r.method != "" && r.method != "new" {
			return nil, api.Errorf(api.CodeMalformed, "method is %.40q; a selection is asked for with new, or without",
				r.method)
		}
		s, err := p.choose(ctx, model, "", r)
		if err != nil {
			return nil, err
		}
		worker := any(ID(s.Worker))
		if n, err := strconv.ParseUint(string(s.Worker), 10, 64); err == nil {
			worker = int64(n)
		}
		return &planeSelection{worker, s.RequiredBlocks, s.Device}, nil
	})
}

// reply returns the result or the error of do as JSON.
func reply(do func() (any, error)) ([]byte, *api.Error) {
	out, err := do()
	var text []byte
	if err == nil {
		text, err = json.Marshal(out)
	}
	if _, failed := statusOf(err); failed != nil {
		return failed.Body(api.JSON), failed
	}
	return text, nil
}

// marked reports whether the request is known. An unknown request is not an error.
func marked(ctx context.Context, ref *api.RequestRef, do func(context.Context, *api.RequestRef) error) (bool, error) {
	err := error(ref.Check())
	if err == nil {
		err = do(ctx, ref)
	}
	if err != nil && api.AsError(err).Code == api.CodeUnknownRequest {
		return false, nil
	}
	return err == nil, err
}

// choose selects a worker, and books the request if the request has an id.
func (p *Plane) choose(ctx context.Context, model, requestID string, r *planeRequest) (*api.Selection, error) {
	q := &api.SelectRequest{Policy: routing.DynamoPolicy, RequestID: requestID, Book: requestID != "",
		RequiredTaints: r.constraints.Required, PreferredTaints: r.constraints.Preferred, StrictPriority: r.strict,
		PriorityJump: r.jump}
	prompt, err := p.prompt(model, r)
	if err != nil {
		return nil, err
	}
	q.Query = api.Query{Model: model, Tokens: prompt.Tokens, Hashes: prompt.Hashes, BlockSize: prompt.BlockSize,
		LoRA: prompt.LoRA, CacheSalt: prompt.CacheSalt}
	q.ISLTokens = prompt.ISLTokens
	if err := q.Check(); err != nil {
		return nil, err
	}
	return p.Router.Select(ctx, q)
}

// prompt returns the prompt of the request. A prompt with multimodal items becomes block hashes.
func (p *Plane) prompt(model string, r *planeRequest) (*api.Prompt, error) {
	if !slices.ContainsFunc(r.media, func(m *media) bool { return m != nil && len(m.Objects) > 0 }) {
		return &api.Prompt{Model: model, Tokens: r.tokens, LoRA: r.lora, CacheSalt: r.salt}, nil
	}
	of, err := p.Resolve.Resolve(model, r.lora)
	if err != nil {
		return nil, err
	}
	blockSize := p.BlockSize(of.Model)
	if blockSize == 0 {
		return nil, api.Errorf(api.CodeUnknownModel,
			"block_mm_infos: %q has no workers, or has workers with several block sizes, so the block size is unknown", model)
	}
	hashes, err := hashMedia(blockSize, 0, events.Space{LoRA: of.LoRA, Salt: r.salt}, r.tokens, r.media)
	if err != nil {
		return nil, err
	}
	return &api.Prompt{Model: of.Model, BlockSize: blockSize, Hashes: hashes, ISLTokens: uint64(len(r.tokens))}, nil
}

func (p *Plane) loads(ctx context.Context, model string, r *planeRequest) (any, error) {
	prompt, err := p.prompt(model, r)
	if err != nil {
		return nil, err
	}
	list, err := p.Router.PotentialLoads(ctx, &api.PotentialRequest{Prompt: *prompt})
	if err != nil {
		return nil, err
	}
	out := &planeLoads{Method: "potential_loads", Loads: []planeLoad{}, Pending: list.PendingCount,
		ISL: list.PendingISLTokens}
	for _, l := range list.Ranks {
		out.Loads = append(out.Loads, planeLoad{ID(l.Worker), l.Rank, l.PotentialPrefillTokens, l.PotentialDecodeBlocks,
			l.ActiveRequests})
	}
	return out, nil
}

package gateway

import (
	"encoding/json"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	modev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/kvatlas/kvatlas/internal/text/fields"
	"github.com/kvatlas/kvatlas/pkg/api"
	"google.golang.org/protobuf/types/known/structpb"
)

// Names of the protocol.
const (
	destination       = "x-gateway-destination-endpoint" // header, and key of the metadata below
	destinationSpace  = "envoy.lb"
	servedKey         = "x-gateway-destination-endpoint-served"
	subsetSpace       = "envoy.lb.subset_hint"
	subsetKey         = "x-gateway-destination-endpoint-subset"
	upstreamAddress   = "upstream.address" // attribute
	dataParallelRank  = "x-data-parallel-rank"
	prefiller         = "x-prefiller-host-port" // of llm-d's sidecar, see sidecarHeaders
	kvCacheSource     = "x-kv-cache-source-host-port"
	maxChunk          = 62_000  // bytes of a body in one message: gRPC's default window has 64 KiB
	maxBody           = 8 << 20 // of a request
	contentTypeHeader = "content-type"
	pathHeader        = ":path"
	statusHeader      = ":status"
	requestIDHeader   = "x-request-id"

	// unsupportedFields is a header of requests and responses.
	unsupportedFields = "x-kvatlas-unsupported-fields"
)

// sidecarHeaders are removed from every request: llm-d's sidecar sends requests to their addresses, so only the gateway
// may set them (llm-d/llm-d-router › pkg/common/routing/common.go).
var sidecarHeaders = []string{prefiller, "x-encoder-hosts-ports", "x-data-parallel-host-port", kvCacheSource}

// Ask is a request without a worker.
type Ask struct {
	API    fields.API // by the path; may be empty
	Body   []byte     // nil without a body, and for a body that is not JSON
	Subset []string   // addresses of the permitted workers; nil permits all

	// Header has the headers of the request for a prefill worker, see prefillHeaders. It may contain a secret.
	Header http.Header
}

// prefillHeaders are the headers of a request that the gateway sends to a prefill worker too.
var prefillHeaders = []string{"authorization", requestIDHeader, "traceparent", "tracestate"}

// passed returns the headers for a prefill worker.
func passed(h *extprocv3.HttpHeaders) http.Header {
	to := http.Header{}
	for _, name := range prefillHeaders {
		if v := header(h, name); v != "" {
			to.Set(name, v)
		}
	}
	return to
}

// Choice is the destination of a request.
type Choice struct {
	Addresses []string // as IP:PORT; the addresses after the first are fallbacks
	Rank      string   // data-parallel rank behind the first address, if it has several
	Prefiller string   // IP:PORT of the prefill worker for a sidecar; empty: none
	Body      []byte   // the request's new body; nil: unchanged
	RequestID string   // new header x-request-id; empty: unchanged

	Unsupported []string // fields that prevent a look-up

	Source string // the KV source as IP:PORT; empty: none

	prefillRank string // data-parallel rank behind Prefiller, if the gateway sends the request there
}

// body returns the body of the request for the chosen worker.
func (c *Choice) body(a *Ask) []byte {
	if c.Body != nil {
		return c.Body
	}
	return a.Body
}

// Effects are the effects of a message, in the order of the fields.
type Effects struct {
	Served string   // address of the answering worker, if not the chosen one
	Failed []string // addresses of workers at which the proxy tried the request before

	PrefillComplete bool
	Reported        bool // the engine has reported its reuse:
	CachedTokens    uint64
	ResponseID      string // id of the response, which later requests may continue; empty without a new id
	Free            bool   // the request has ended

	// Tokens in the usage of a complete answer, with Free. PromptTokens is zero if the usage is unknown.
	PromptTokens, CompletionTokens uint64

	Result api.Result // of the request at the answering worker, with Free; empty: unknown

	Replies []*extprocv3.ProcessingResponse

	Ask *Ask // the caller answers by [Machine.Chosen] or [Machine.Refuse]

	Err error // the proxy has violated the protocol, and the stream ends
}

// Machine is the state of one stream. It is not safe for concurrent use.
type Machine struct {
	phase                         phase
	duplexRequest, duplexResponse bool // bodies are FULL_DUPLEX_STREAMED
}

// phase is a stage of a stream. A phase type has only the data of its stage.
type phase interface {
	step(m *Machine, r *extprocv3.ProcessingRequest) Effects
}

type (
	// begin waits for the request's headers.
	begin struct{}

	// reading waits for the rest of the request's body.
	reading struct {
		ask  Ask
		skip bool // the choice does not need the body
	}

	// choosing waits for a choice.
	choosing struct {
		ask      Ask
		after    after
		trailers bool // the request has trailers
	}

	// waiting waits for the response's headers. The rest of a streamed body without JSON arrives meanwhile.
	waiting struct {
		addresses   []string // the chosen worker and the fallbacks
		unsupported string   // value of the header unsupportedFields; may be empty
		streamed    bool     // the choice did not need the body, which is not complete yet
	}

	// answering waits for the rest of the response.
	answering struct {
		own bool // a response of the proxy itself, which refuses a request before the choice

		failure api.Result // of the worker, by the status; empty: none
		begun   bool       // a part of the body has arrived
		usage   usage
		id      responseID

		streamed bool // the request's body is not complete yet
	}

	// over waits for the end of the stream: the request has ended, or was refused.
	over struct{}
)

// after is the kind of message that the choice answers.
type after int

const (
	afterHeaders after = iota + 1 // the request has no body
	afterBuffered
	afterDuplex
	beforeDuplex // the choice does not need the body
)

// NewMachine returns the machine of a new stream.
func NewMachine() *Machine { return &Machine{phase: begin{}} }

// Held returns the number of buffered body bytes.
func (m *Machine) Held() int {
	switch p := m.phase.(type) {
	case *reading:
		return len(p.ask.Body)
	case *choosing:
		return len(p.ask.Body)
	}
	return 0
}

// Answered reports whether the machine has answered the proxy, with a choice or a refusal.
func (m *Machine) Answered() bool {
	switch p := m.phase.(type) {
	case *waiting, over:
		return true
	case *answering:
		return !p.own
	}
	return false
}

// Step processes a message.
func (m *Machine) Step(r *extprocv3.ProcessingRequest) Effects {
	if r.Request == nil {
		return Effects{} // a message about the proxy's own state
	}
	return m.phase.step(m, r)
}

// End processes the end of the stream.
func (m *Machine) End() (e Effects) {
	switch p := m.phase.(type) {
	case *waiting:
		e.Free = true
	case *answering:
		e.Free, e.Result = !p.own, p.failure
	}
	m.phase = over{}
	return e
}

// broken ends a stream after an unexpected message.
func (m *Machine) broken(r *extprocv3.ProcessingRequest) Effects {
	was := m.phase
	e := m.End()
	e.Err = api.Errorf(api.CodeMalformed, "the proxy sends %T, which the phase %T does not expect", r.Request, was)
	return e
}

func (begin) step(m *Machine, r *extprocv3.ProcessingRequest) Effects {
	h := r.GetRequestHeaders()
	if h == nil {
		return m.broken(r)
	}
	mode := modev3.ProcessingMode_FULL_DUPLEX_STREAMED
	m.duplexResponse = true
	if c := r.ProtocolConfig; c != nil {
		mode = c.RequestBodyMode
		m.duplexResponse = c.ResponseBodyMode == modev3.ProcessingMode_FULL_DUPLEX_STREAMED
	}
	m.duplexRequest = mode == modev3.ProcessingMode_FULL_DUPLEX_STREAMED
	ask := Ask{API: fields.OfPath(header(h, pathHeader)), Subset: subset(r), Header: passed(h)}
	isJSON := isJSON(header(h, contentTypeHeader))
	switch {
	case h.EndOfStream || mode == modev3.ProcessingMode_NONE:
		return m.choose(ask, afterHeaders, false)
	case m.duplexRequest && !isJSON:
		return m.choose(ask, beforeDuplex, false)
	case m.duplexRequest:
		m.phase = &reading{ask: ask}
		return Effects{}
	case mode == modev3.ProcessingMode_BUFFERED:
		m.phase = &reading{ask, !isJSON}
		return Effects{Replies: []*extprocv3.ProcessingResponse{headersReply(false, nil)}}
	}
	m.phase = &reading{ask: ask}
	return m.Refuse(api.Errorf(api.CodeInternal,
		"the proxy sends bodies in the mode %v; set request_body_mode to FULL_DUPLEX_STREAMED or BUFFERED", mode))
}

func (p *reading) step(m *Machine, r *extprocv3.ProcessingRequest) Effects {
	switch q := r.Request.(type) {
	case *extprocv3.ProcessingRequest_RequestBody:
		if p.skip {
			return m.choose(p.ask, afterBuffered, false)
		}
		if len(p.ask.Body)+len(q.RequestBody.Body) > maxBody {
			return m.Refuse(api.Errorf(api.CodeTooLarge, "the body has more than %d bytes (%d MiB)", maxBody, maxBody>>20))
		}
		p.ask.Body = append(p.ask.Body, q.RequestBody.Body...)
		switch {
		case !m.duplexRequest:
			return m.choose(p.ask, afterBuffered, false)
		case q.RequestBody.EndOfStream:
			return m.choose(p.ask, afterDuplex, false)
		}
		return Effects{}
	case *extprocv3.ProcessingRequest_RequestTrailers:
		if m.duplexRequest {
			return m.choose(p.ask, afterDuplex, true)
		}
	case *extprocv3.ProcessingRequest_ResponseHeaders:
		m.phase = &answering{own: true}
		return Effects{Replies: []*extprocv3.ProcessingResponse{headersReply(true, nil)}}
	}
	return m.broken(r)
}

func (m *Machine) choose(ask Ask, after after, trailers bool) Effects {
	m.phase = &choosing{ask, after, trailers}
	return Effects{Ask: &ask}
}

func (p *choosing) step(m *Machine, r *extprocv3.ProcessingRequest) Effects { return m.broken(r) }

// Chosen continues the request with a choice, after an Ask.
func (m *Machine) Chosen(c *Choice) (e Effects) {
	p, ok := m.phase.(*choosing)
	if !ok {
		return e // the stream has ended
	}
	w := &waiting{c.Addresses, strings.Join(c.Unsupported, ","), p.after == beforeDuplex}
	m.phase = w
	to := strings.Join(c.Addresses, ",")
	set := []*corev3.HeaderValueOption{setHeader(destination, to)}
	if c.Rank != "" {
		set = append(set, setHeader(dataParallelRank, c.Rank))
	}
	if w.unsupported != "" {
		set = append(set, setHeader(unsupportedFields, w.unsupported))
	}
	if c.Source != "" {
		set = append(set, setHeader(kvCacheSource, c.Source))
	}
	if c.Prefiller != "" {
		set = append(set, setHeader(prefiller, c.Prefiller))
	}
	if c.RequestID != "" {
		set = append(set, setHeader(requestIDHeader, c.RequestID))
	}
	body := p.ask.Body
	if c.Body != nil {
		body = c.Body
		set = append(set, setHeader("content-length", strconv.Itoa(len(body)))) // Envoy refuses another length
	}
	common := &extprocv3.CommonResponse{ // a proxy removes headers before it sets headers
		HeaderMutation: &extprocv3.HeaderMutation{SetHeaders: set, RemoveHeaders: sidecarHeaders}}
	var first *extprocv3.ProcessingResponse
	if p.after == afterBuffered {
		if c.Body != nil {
			common.BodyMutation = &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_Body{Body: body}}
		}
		first = bodyReply(false, common)
	} else {
		first = headersReply(false, common)
	}
	first.DynamicMetadata = &structpb.Struct{Fields: map[string]*structpb.Value{
		destinationSpace: structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{
			destination: structpb.NewStringValue(to)}})}}
	e.Replies = append(e.Replies, first)
	if p.after == afterDuplex {
		e.Replies = appendChunks(e.Replies, false, body, !p.trailers)
		if p.trailers {
			e.Replies = append(e.Replies, trailersReply(false))
		}
	}
	return e
}

// Refuse makes the proxy answer the request with an error. It is valid in the phases reading and choosing.
func (m *Machine) Refuse(err error) Effects {
	switch m.phase.(type) {
	case *reading, *choosing:
	default:
		return Effects{}
	}
	m.phase = over{}
	failure := api.AsError(err)
	status := failure.Code.HTTPStatus()
	body, _ := json.Marshal(map[string]any{"error": map[string]any{ // text always encodes
		"message": failure.Message, "type": "kvatlas_error", "code": failure.Code}})
	set := []*corev3.HeaderValueOption{setHeader(contentTypeHeader, api.JSON)}
	if status == 429 || status == 503 {
		set = append(set, setHeader("retry-after", strconv.FormatUint(max(1, failure.RetryAfter()), 10)))
	}
	return Effects{Replies: []*extprocv3.ProcessingResponse{{
		Response: &extprocv3.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extprocv3.ImmediateResponse{
			Status: &typev3.HttpStatus{Code: typev3.StatusCode(status)}, Body: body,
			Headers: &extprocv3.HeaderMutation{SetHeaders: set}, Details: "kvatlas_" + string(failure.Code),
		}}}}}
}

func (p *waiting) step(m *Machine, r *extprocv3.ProcessingRequest) (e Effects) {
	switch q := r.Request.(type) {
	case *extprocv3.ProcessingRequest_RequestBody:
		if !p.streamed {
			return m.broken(r)
		}
		p.streamed = !q.RequestBody.EndOfStream
		e.Replies = appendChunks(nil, false, q.RequestBody.Body, q.RequestBody.EndOfStream)
		return e
	case *extprocv3.ProcessingRequest_RequestTrailers:
		if m.duplexRequest && !p.streamed {
			return m.broken(r)
		}
		p.streamed = false
		e.Replies = append(e.Replies, trailersReply(false))
		return e
	case *extprocv3.ProcessingRequest_ResponseHeaders:
		if by := served(r); by != "" && (len(p.addresses) == 0 || by != p.addresses[0]) {
			e.Served, e.Failed = by, p.addresses
			if at := slices.Index(p.addresses, by); at >= 0 {
				e.Failed = p.addresses[:at]
			}
		}
		failure := failureOf(header(q.ResponseHeaders, statusHeader))
		var mutation *extprocv3.CommonResponse
		if p.unsupported != "" {
			mutation = &extprocv3.CommonResponse{HeaderMutation: &extprocv3.HeaderMutation{
				SetHeaders: []*corev3.HeaderValueOption{setHeader(unsupportedFields, p.unsupported)}}}
		}
		e.Replies = append(e.Replies, headersReply(true, mutation))
		m.phase = &answering{streamed: p.streamed, failure: failure}
		if q.ResponseHeaders.EndOfStream {
			m.phase, e.Free, e.Result = over{}, true, failure
		}
		return e
	}
	return m.broken(r)
}

func (p *answering) step(m *Machine, r *extprocv3.ProcessingRequest) (e Effects) {
	switch q := r.Request.(type) {
	case *extprocv3.ProcessingRequest_RequestBody, *extprocv3.ProcessingRequest_RequestTrailers:
		if p.streamed { // the engine answers before it has the whole body
			w := waiting{streamed: true}
			e = w.step(m, r)
			p.streamed = w.streamed
			return e
		}
	case *extprocv3.ProcessingRequest_ResponseBody:
		b := q.ResponseBody
		if !p.own {
			e.PrefillComplete = len(b.Body) > 0 && !p.begun && p.failure == ""
			p.begun = p.begun || e.PrefillComplete
			e.CachedTokens, e.Reported = p.usage.read(b.Body)
			e.ResponseID = p.id.read(b.Body)
		}
		if m.duplexResponse {
			e.Replies = appendChunks(e.Replies, true, b.Body, b.EndOfStream)
		} else {
			e.Replies = append(e.Replies, bodyReply(true, nil))
		}
		if b.EndOfStream {
			p.complete(m, &e)
		}
		return e
	case *extprocv3.ProcessingRequest_ResponseTrailers:
		e.Replies = append(e.Replies, trailersReply(true))
		p.complete(m, &e)
		return e
	}
	return m.broken(r)
}

// complete ends a complete answer.
func (p *answering) complete(m *Machine, e *Effects) {
	m.phase, e.Free, e.Result = over{}, !p.own, p.failure
	if p.failure == "" {
		e.PromptTokens, e.CompletionTokens = p.usage.prompt(), p.usage.completion()
	}
}

func (over) step(*Machine, *extprocv3.ProcessingRequest) Effects { return Effects{} }

// failureOf returns the failure of a worker that a status of HTTP shows; empty without a failure. A proxy answers 503
// or 504 itself if the worker does not answer.
func failureOf(status string) api.Result {
	switch code, err := strconv.Atoi(status); {
	case err != nil || code < 500 || code == 501: // 501: the engine does not have the path
		return ""
	case code == 504:
		return api.ResultTimeout
	}
	return api.ResultStatus
}

// appendChunks appends a body in the form of FULL_DUPLEX_STREAMED. An empty body that is not the end adds no message.
func appendChunks(
	to []*extprocv3.ProcessingResponse, response bool, body []byte, end bool,
) []*extprocv3.ProcessingResponse {
	for first := true; len(body) > 0 || first && end; first = false {
		n := min(len(body), maxChunk)
		to = append(to, bodyReply(response, &extprocv3.CommonResponse{BodyMutation: &extprocv3.BodyMutation{
			Mutation: &extprocv3.BodyMutation_StreamedResponse{StreamedResponse: &extprocv3.StreamedBodyResponse{
				Body: body[:n:n], EndOfStream: end && n == len(body)}}}}))
		body = body[n:]
	}
	return to
}

func headersReply(response bool, c *extprocv3.CommonResponse) *extprocv3.ProcessingResponse {
	h := &extprocv3.HeadersResponse{Response: c}
	if response {
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: h}}
	}
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: h}}
}

func bodyReply(response bool, c *extprocv3.CommonResponse) *extprocv3.ProcessingResponse {
	b := &extprocv3.BodyResponse{Response: c}
	if response {
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseBody{ResponseBody: b}}
	}
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{RequestBody: b}}
}

func trailersReply(response bool) *extprocv3.ProcessingResponse {
	t := &extprocv3.TrailersResponse{}
	if response {
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseTrailers{ResponseTrailers: t}}
	}
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestTrailers{RequestTrailers: t}}
}

func setHeader(name, value string) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{Header: &corev3.HeaderValue{Key: name, RawValue: []byte(value)},
		AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD}
}

// header returns the value of a header; empty without the header.
func header(h *extprocv3.HttpHeaders, name string) string {
	for _, v := range h.GetHeaders().GetHeaders() {
		if strings.EqualFold(v.Key, name) {
			if len(v.RawValue) > 0 {
				return textproto.TrimString(string(v.RawValue))
			}
			return textproto.TrimString(v.Value)
		}
	}
	return ""
}

// isJSON reports whether a content type is JSON's. A request without a content type counts as JSON.
func isJSON(contentType string) bool {
	media, _, _ := strings.Cut(contentType, ";")
	media = strings.ToLower(textproto.TrimString(media))
	return media == "" || media == "application/json" ||
		strings.HasPrefix(media, "application/") && strings.HasSuffix(media, "+json")
}

// metadata returns a value of the stream's metadata; nil without the value.
func metadata(r *extprocv3.ProcessingRequest, space, key string) *structpb.Value {
	return r.MetadataContext.GetFilterMetadata()[space].GetFields()[key]
}

// subset returns the addresses that the proxy permits; nil permits all.
func subset(r *extprocv3.ProcessingRequest) []string {
	v := metadata(r, subsetSpace, subsetKey)
	if v == nil {
		return nil
	}
	list := []string{}
	add := func(text string) {
		for part := range strings.SplitSeq(text, ",") {
			if part = strings.TrimSpace(part); part != "" {
				list = append(list, part)
			}
		}
	}
	add(v.GetStringValue())
	for _, x := range v.GetListValue().GetValues() {
		add(x.GetStringValue())
	}
	return list
}

// served returns the address of the answering worker, from the first source that a proxy provides; empty without a
// source.
func served(r *extprocv3.ProcessingRequest) string {
	if v := metadata(r, destinationSpace, servedKey).GetStringValue(); v != "" {
		return v
	}
	if v := header(r.GetResponseHeaders(), servedKey); v != "" {
		return v
	}
	for _, attributes := range r.Attributes {
		if v := attributes.GetFields()[upstreamAddress].GetStringValue(); v != "" {
			return v
		}
	}
	return ""
}

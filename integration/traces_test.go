package integration

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"go.opentelemetry.io/otel/trace"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc/metadata"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/faces/kvindexer/kvindexerpb"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/tools/mastersim"
)

// caller returns a context with the span of a client.
func caller(ctx context.Context, n byte, flags trace.TraceFlags) (context.Context, trace.SpanContext) {
	of := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{0: 7, 15: n},
		SpanID: trace.SpanID{0: 9, 7: n}, TraceFlags: flags})
	return trace.ContextWithSpanContext(ctx, of), of
}

// spanTree writes the trace below a span as sorted names with their children.
func spanTree(spans []harness.CollectedSpan, parent string) string {
	var below []string
	for _, s := range spans {
		if s.Parent == parent {
			below = append(below, s.Name+"@"+s.Instance+spanTree(spans, s.ID))
		}
	}
	if below == nil {
		return ""
	}
	slices.Sort(below)
	return "(" + strings.Join(slices.Compact(below), " ") + ")"
}

// TestTraces runs two nodes with different workers, two shims, a tokenizer and a shared store with a collector. The
// spans show all steps of a query, a choice and a batch of events. Unsampled requests send no spans.
func TestTraces(t *testing.T) {
	t.Parallel()
	collector := harness.StartCollector(t)
	sending := func(sample string) []string {
		return []string{"--otlp-endpoint", collector.URL, "--otlp-headers-file", collector.Headers, "--trace-sample", sample}
	}
	master, err := mastersim.Start("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer master.Stop()
	host, port, err := net.SplitHostPort(master.Addr())
	if err != nil {
		t.Fatal(err)
	}
	store := hicache.SGLang{Backend: "mooncake", PageSize: harness.BlockSize, TPSize: 1, PPSize: 1,
		Master: hicache.Master{Address: host}}
	if store.MetricsPort, err = strconv.Atoi(port); err != nil {
		t.Fatal(err)
	}
	prompt := harness.Tokens(1, 10*harness.BlockSize)
	tokenizer, _, _ := startTokenizer(t, prompt)
	tokenizers := filepath.Join(t.TempDir(), "tokenizers.yaml")
	text := "models:\n  m: {tokenize: " + tokenizer + ", timeout_ms: 60000}\n"
	if err := os.WriteFile(tokenizers, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	nats := harness.StartNATS(t)
	nodes := map[string]*harness.Indexer{}
	for _, id := range []string{"a", "b"} {
		x := &harness.Indexer{NATS: nats, Process: harness.Start(t, "indexer", append([]string{"serve", "--nats", nats,
			"--node-id", id, "--partitions", "4", "--partition-replicas", "1", "--http-listen", "127.0.0.1:0", "--tokenizers",
			tokenizers, "--l3-config", harness.WriteStores(t, map[string]hicache.Config{"m": {SGLang: &store}})},
			sending("1")...)...)}
		nodes[id] = x
	}
	for _, x := range nodes {
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
	}
	ctx := harness.Context(t)
	one, two := harness.StartSimEngine(t), harness.StartSimEngine(t)
	traced := harness.StartSimShim(t, one, nats, "traced", sending("1")...)
	quiet := harness.StartSimShim(t, two, nats, "quiet", sending("0")...)
	harness.ServePrompt(t, one, prompt[:6*harness.BlockSize])
	harness.ServePrompt(t, two, prompt[:3*harness.BlockSize])
	ns := harness.OpenNamespace(t, ctx, nats)
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	const more = 8 // enough for every partition
	for i := range more {
		e := events.Event{Kind: events.Stored, Tier: events.Device, Locals: hasher.Hash(nil, prompt[:2*harness.BlockSize]),
			Blocks: []events.BlockHash{1, 2}}
		harness.PublishAs(t, ctx, ns, events.WorkerID(fmt.Sprint("w", i)), &events.Batch{Incarnation: 1, FirstID: 1,
			Model: "m", BlockSize: harness.BlockSize, Events: []events.Event{e}})
	}
	over, err := client.NATS(connectNATS(t, "nats://"+nats), "default", client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer over.Close()
	onA := harness.Ask(t, nodes["a"].HTTP)
	query := &api.Query{Model: "m", Text: &api.Text{Prompt: "a secret prompt"}}
	harness.Eventually(t, "both nodes and the shared store get a query", func() (bool, string) {
		a, err := onA.Find(ctx, query)
		return err == nil && a.Complete && len(a.Workers) == more+2 && a.Workers[0].Device == 6 &&
			a.L3.Status == api.L3OK, fmt.Sprintf("%+v %v", a, err)
	})

	of := func(c trace.SpanContext) []harness.CollectedSpan {
		return collector.Spans(func(s *harness.CollectedSpan) bool { return s.Trace == c.TraceID().String() })
	}
	number := byte(0)
	// until repeats a request, every time with another span, until a resulting trace satisfies is. Nodes may count as gone
	// after a pause of the machine, and requests then take another path.
	until := func(what string, ask func(ctx context.Context) error, is func([]harness.CollectedSpan, string) bool) (
		spans []harness.CollectedSpan) {
		t.Helper()
		var asked []trace.SpanContext
		harness.Eventually(t, what, func() (bool, string) {
			if number < 250 {
				number++
				asking, at := caller(ctx, number, trace.FlagsSampled)
				if err := ask(asking); err != nil {
					return false, err.Error()
				}
				asked = append(asked, at)
			}
			last := ""
			for _, at := range asked {
				if spans = of(at); is(spans, at.SpanID().String()) {
					return true, ""
				}
				last = spanTree(spans, at.SpanID().String())
			}
			return false, last
		})
		return spans
	}
	named := func(spans []harness.CollectedSpan, name string) (span harness.CollectedSpan) {
		for _, s := range spans {
			if s.Name == name {
				span = s
			}
		}
		return span
	}
	attributes := func(s harness.CollectedSpan, kind tracepb.Span_SpanKind, want map[string]string) {
		t.Helper()
		for key, value := range want {
			if s.Attributes[key] != value {
				t.Errorf("%s: %s is %q, not %q", s.Name, key, s.Attributes[key], value)
			}
		}
		if s.Kind != kind {
			t.Errorf("%s is a span of %v", s.Name, s.Kind)
		}
	}
	const server = tracepb.Span_SPAN_KIND_SERVER

	spans := until("the trace of a query has all its parts", func(ctx context.Context) error {
		_, err := onA.Find(ctx, query)
		return err
	}, func(spans []harness.CollectedSpan, caller string) bool {
		return spanTree(spans, caller) ==
			"(kvatlas.find@a(hash@a peers@a(index@a peer@a(kvatlas.own_find@b(index@b))) store@a tokenize@a))"
	})
	attributes(named(spans, "kvatlas.find"), server, map[string]string{"gen_ai.request.model": "m",
		"llm_d.epp.producer.total_blocks": "10", "llm_d.epp.producer.max_match_blocks": "6", "http.route": "/v1/find",
		"http.response.status_code": "200", "kvatlas.complete": "true"})
	attributes(named(spans, "kvatlas.own_find"), server, map[string]string{"messaging.system": "nats",
		"messaging.destination.name": "kv.v1.default.node.b.find"})
	attributes(named(spans, "peer"), tracepb.Span_SPAN_KIND_CLIENT, map[string]string{"kvatlas.node": "b",
		"kvatlas.peer.kind": "first"})
	attributes(named(spans, "tokenize"), tracepb.Span_SPAN_KIND_INTERNAL,
		map[string]string{"llm_d.epp.token_producer.token_count": "160"})

	bookings := 0
	spans = until("the trace of a choice has all its parts", func(ctx context.Context) error {
		bookings++
		chosen, err := over.Select(ctx, &api.SelectRequest{Query: api.Query{Model: "m", Tokens: prompt},
			RequestID: fmt.Sprint("r", bookings), Book: true})
		if err == nil && (!chosen.Booked || chosen.Worker == "") {
			err = fmt.Errorf("%+v", chosen)
		}
		return err
	}, func(spans []harness.CollectedSpan, caller string) bool {
		root := named(spans, "kvatlas.select")
		for _, name := range []string{"hash", "peers", "load", "choose", "book"} {
			if s := named(spans, name); s.ID == "" || s.Parent != root.ID {
				return false
			}
		}
		return root.Parent == caller && named(spans, "kvatlas.own_find").Parent == named(spans, "peer").ID
	})
	root := named(spans, "kvatlas.select")
	attributes(root, server, map[string]string{"messaging.system": "nats", "kvatlas.policy": "kvatlas",
		"gen_ai.request.model": "m", "llm_d.epp.picker.candidate_endpoints": "2"})
	if !strings.HasPrefix(root.Attributes["gen_ai.request.id"], "r") || root.Attributes["kvatlas.worker"] == "" {
		t.Errorf("a choice: %v", root.Attributes)
	}

	spans = until("the trace of a refusal has the reason", func(ctx context.Context) error {
		if _, err := over.Find(ctx, &api.Query{Model: "none", Tokens: prompt}); client.CodeOf(err) !=
			api.CodeUnknownModel {
			return fmt.Errorf("no refusal: %w", err)
		}
		return nil
	}, func(spans []harness.CollectedSpan, _ string) bool { return named(spans, "kvatlas.find").ID != "" })
	attributes(named(spans, "kvatlas.find"), server, map[string]string{"error.type": string(api.CodeUnknownModel)})

	// Batches of events, and the nodes that have applied them.
	harness.Eventually(t, "batches have spans, with linked spans of the applying nodes", func() (bool, string) {
		batches := collector.Spans(func(s *harness.CollectedSpan) bool { return s.Name == "shim.batch" })
		for _, b := range batches {
			links := collector.Spans(func(s *harness.CollectedSpan) bool {
				return s.Name == "apply" && slices.Contains(s.Links, b.Trace+" "+b.ID)
			})
			if len(links) == 0 {
				return false, fmt.Sprintf("no node has applied %+v", b)
			}
			attributes(b, tracepb.Span_SPAN_KIND_PRODUCER, map[string]string{"messaging.system": "nats", "kvatlas.model": "m"})
			attributes(links[0], tracepb.Span_SPAN_KIND_CONSUMER, map[string]string{"messaging.system": "nats",
				"messaging.operation.name": "apply"})
			if b.Instance != "traced" || b.Service != "kvatlas-worker-shim" || b.Parent != "" ||
				links[0].Service != "kvatlas-indexer" || links[0].Trace == b.Trace {
				t.Errorf("a batch %+v, applied by %+v", b, links[0])
			}
		}
		return len(batches) > 0, "no batch"
	})

	// Unsampled or secret data.
	asking, unsampled := caller(ctx, 255, 0)
	for _, c := range []*client.Client{onA, over} {
		if _, err := c.Find(asking, query); err != nil {
			t.Fatal(err)
		}
	}
	status, scrape, err := harness.Request(nodes["b"].HTTP, "GET", "/metrics", "")
	if err != nil || status != 200 || !strings.Contains(scrape, `kvatlas_trace_spans_total{outcome="dropped"} 0`) {
		t.Errorf("%d %v: no metric of spans:\n%s", status, err, scrape)
	}
	said := ""
	for _, p := range []*harness.Process{traced, quiet, nodes["a"].Process, nodes["b"].Process} {
		p.Stop() // a stopped shim sends waiting spans
		said += p.Said()
	}
	if spans := of(unsampled); len(spans) > 0 {
		t.Errorf("not sampled: %+v", spans)
	}
	wrong := collector.Spans(func(s *harness.CollectedSpan) bool {
		return strings.Contains(fmt.Sprint(s.Attributes), "a secret prompt") || s.Instance == "quiet"
	})
	if len(wrong) > 0 || strings.Contains(said, "collectors-own-token") {
		t.Errorf("sent anyway: %+v, log: %s", wrong, said)
	}
}

// TestTracesGRPC checks that calls over gRPC continue the trace in their metadata: SGLang's call with its find, Envoy's
// stream with its choice. Unsampled calls send no spans.
func TestTracesGRPC(t *testing.T) {
	t.Parallel()
	collector := harness.StartCollector(t)
	x := harness.StartIndexer(t, t.TempDir(), "", "--node-id", "a", "--grpc-listen", "127.0.0.1:0",
		"--otlp-endpoint", collector.URL, "--otlp-headers-file", collector.Headers, "--trace-sample", "0")
	conn := dialGRPC(t, x)
	ctx := harness.Context(t)
	prompt := harness.Tokens(1, 4*harness.BlockSize)
	e := harness.StartSimEngine(t)
	harness.StartSimShim(t, e, x.NATS, "one", "--serving-endpoint", "http://127.0.0.1:8000")
	harness.ServePrompt(t, e, prompt)
	harness.Eventually(t, "the worker may be chosen", func() (bool, string) {
		var list api.WorkerList
		err := harness.HTTPDo(x.HTTP, "GET", "/v1/workers", nil, &list)
		return err == nil && len(list.Workers) == 1 && list.Workers[0].Record != nil && list.Workers[0].Blocks.Device == 4,
			fmt.Sprint(list, err)
	})
	ask := func(ctx context.Context) error {
		a, err := kvindexerpb.NewKVIndexerClient(conn).MatchExternalKvPrefix(ctx,
			&kvindexerpb.MatchExternalKvPrefixRequest{Hashes: []int64{1, 2}})
		if err == nil && a.BlocksRead != 2 {
			err = fmt.Errorf("%+v", a)
		}
		return err
	}
	body := []byte(`{"model":"m","prompt":` + harness.JSONList(prompt) + `}`)
	choose := func(ctx context.Context) error {
		stream, err := extprocv3.NewExternalProcessorClient(conn).Process(ctx)
		if err != nil {
			return err
		}
		headers := &corev3.HeaderMap{}
		for _, h := range [][2]string{{":method", "POST"}, {":path", "/v1/completions"},
			{"content-type", "application/json"}} {
			headers.Headers = append(headers.Headers, &corev3.HeaderValue{Key: h[0], RawValue: []byte(h[1])})
		}
		first := &extprocv3.HttpHeaders{Headers: headers}
		rest := &extprocv3.HttpBody{Body: body, EndOfStream: true}
		for _, m := range []*extprocv3.ProcessingRequest{
			{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: first}},
			{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: rest}},
		} {
			if err := stream.Send(m); err != nil {
				return err
			}
		}
		_ = stream.CloseSend()
		for replies := 0; ; replies++ {
			if _, err := stream.Recv(); errors.Is(err, io.EOF) && replies > 0 {
				return nil
			} else if err != nil {
				return err
			}
		}
	}
	for i, c := range []struct {
		what string
		ask  func(context.Context) error
		want string
	}{
		{"SGLang's question", ask, "(kv_indexer.v1.KVIndexer/MatchExternalKvPrefix(kvatlas.find(index)))"},
		{"Envoy's stream", choose,
			"(envoy.service.ext_proc.v3.ExternalProcessor/Process(kvatlas.select(book choose hash index load)))"},
	} {
		var asked []trace.SpanContext
		harness.Eventually(t, c.what+" is traced", func() (bool, string) {
			for flags := trace.TraceFlags(0); flags <= trace.FlagsSampled && len(asked) < 120; flags++ {
				asking, at := caller(ctx, byte(2*len(asked)+i), flags)
				if err := c.ask(metadata.AppendToOutgoingContext(ctx, rpc.HeaderTrace, rpc.Traceparent(asking))); err != nil {
					return false, err.Error()
				}
				asked = append(asked, at)
			}
			last := ""
			for _, at := range asked {
				spans := collector.Spans(func(s *harness.CollectedSpan) bool { return s.Trace == at.TraceID().String() })
				if len(spans) > 0 && !at.IsSampled() {
					t.Fatalf("not sampled: %+v", spans)
				}
				if last = strings.ReplaceAll(spanTree(spans, at.SpanID().String()), "@a", ""); last == c.want {
					return true, ""
				}
			}
			return false, last
		})
	}
}

// Command engine simulates vLLM and SGLang in pods without a GPU. It accepts the arguments of `vllm serve` and of
// `python3 -m sglang.launch_server` in the documentation, and refuses other arguments. It serves /health, /metrics and
// completions of token ids. With --kv-events-config it publishes KV-cache events for every data-parallel rank.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// settings are the arguments of both engines.
type settings struct {
	model     string
	kvEvents  string
	blockSize int
	ranks     int
	host      string
	port      int

	needsEnable bool // vLLM publishes only with "enable_kv_cache_events": true
}

// kvEventsConfig has the fields of vLLM's KVEventsConfig in the documentation.
type kvEventsConfig struct {
	Enable    *bool  `json:"enable_kv_cache_events"`
	Publisher string `json:"publisher"`
	Endpoint  string `json:"endpoint"`
	Replay    string `json:"replay_endpoint"`
	Topic     string `json:"topic"`
	Format    string `json:"format"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "engine:", err)
		os.Exit(1)
	}
}

// parse reads the arguments of vLLM (serve MODEL ...) or of SGLang (-m sglang.launch_server ...).
func parse(args []string) (*settings, error) {
	s := &settings{}
	f := flag.NewFlagSet("engine", flag.ContinueOnError)
	f.StringVar(&s.kvEvents, "kv-events-config", "", "")
	f.StringVar(&s.host, "host", "", "")
	switch {
	case len(args) > 1 && args[0] == "serve":
		s.model, s.needsEnable, args = args[1], true, args[2:]
		f.IntVar(&s.port, "port", 8000, "")
		f.IntVar(&s.blockSize, "block-size", 16, "")
		f.IntVar(&s.ranks, "data-parallel-size", 1, "")
		f.StringVar(&s.model, "served-model-name", s.model, "")
	case len(args) > 1 && slices.Equal(args[:2], []string{"-m", "sglang.launch_server"}):
		args = args[2:]
		var path string
		f.IntVar(&s.port, "port", 30000, "")
		f.IntVar(&s.blockSize, "page-size", 1, "")
		f.IntVar(&s.ranks, "dp-size", 1, "")
		f.StringVar(&path, "model-path", "", "")
		f.StringVar(&s.model, "served-model-name", "", "")
		defer func() {
			if s.model == "" {
				s.model = path
			}
		}()
	default:
		return nil, fmt.Errorf("%q are the arguments of neither engine", args)
	}
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	if f.NArg() > 0 {
		return nil, fmt.Errorf("%q are not flags", f.Args())
	}
	return s, nil
}

// onPort returns an endpoint for a rank: all addresses, and the port plus the rank.
func onPort(endpoint string, rank int) (string, error) {
	port, ok := strings.CutPrefix(endpoint, "tcp://*:")
	if !ok {
		return "", fmt.Errorf("endpoint %q is not tcp://*:PORT", endpoint)
	}
	return zmtp.PortsAfter("tcp://0.0.0.0:"+port, uint32(rank))
}

// publish starts the publishers of all ranks by --kv-events-config. Without the flag, an engine publishes nothing.
func (s *settings) publish(ctx context.Context) (ranks []*enginesim.Engine, err error) {
	if s.kvEvents == "" {
		return nil, nil
	}
	var c kvEventsConfig
	decoder := json.NewDecoder(strings.NewReader(s.kvEvents))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&c); err != nil {
		return nil, fmt.Errorf("--kv-events-config %q: %w", s.kvEvents, err)
	}
	if c.Publisher != "zmq" || s.needsEnable && (c.Enable == nil || !*c.Enable) {
		return nil, fmt.Errorf("--kv-events-config %q publishes nothing", s.kvEvents)
	}
	for i := range s.ranks {
		endpoint, err := onPort(c.Endpoint, i)
		if err != nil {
			return nil, err
		}
		replay, err := onPort(c.Replay, i)
		if err != nil {
			return nil, err
		}
		e, err := enginesim.Start(context.WithoutCancel(ctx), enginesim.Config{Endpoint: endpoint, Replay: replay,
			Topic: c.Topic, Rank: events.Rank(i), BlockSize: s.blockSize, Capacity: 20_000})
		if err != nil {
			return nil, err
		}
		ranks = append(ranks, e)
	}
	return ranks, nil
}

func run(ctx context.Context, args []string) error {
	s, err := parse(args)
	if err != nil {
		return err
	}
	ranks, err := s.publish(ctx)
	if err != nil {
		return err
	}
	for _, e := range ranks {
		defer e.Stop()
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(s.host, fmt.Sprint(s.port)))
	if err != nil {
		return err
	}
	server := &http.Server{Handler: handler(s, ranks)}
	context.AfterFunc(ctx, func() { server.Close() })
	fmt.Printf("engine: serves %s with %d ranks on port %d\n", s.model, s.ranks, s.port)
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func handler(s *settings, ranks []*enginesim.Engine) http.Handler {
	var served atomic.Int64
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, "engine_requests_total %d\n", served.Load())
	})
	// The form is vLLM's. The text is not read.
	mux.HandleFunc("POST /tokenize", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"count":3,"max_model_len":40960,"tokens":[1,2,3]}`)
	})
	mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) {
		var request struct {
			Model  string
			Prompt []uint32
		}
		if err := json.NewDecoder(r.Body).Decode(&request); err != nil || request.Model != s.model {
			http.Error(w, fmt.Sprintf("not a completion of token ids of %s: %v", s.model, err), http.StatusBadRequest)
			return
		}
		n := served.Add(1)
		hit := 0
		if len(ranks) > 0 {
			var err error
			if hit, err = ranks[int(n)%len(ranks)].Serve(request.Prompt, []uint32{1}); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
		}
		fmt.Fprintf(w, `{"object":"text_completion","usage":{"prompt_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}`,
			len(request.Prompt), hit*s.blockSize)
	})
	return mux
}

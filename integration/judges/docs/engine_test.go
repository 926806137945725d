//go:build judges

package docs

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"

	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/openaisim"
)

// serveEngine is `vllm serve MODEL` without a GPU: a simulated engine with vLLM's events, OpenAI's API, and the paths
// with the settings of vLLM 0.32.
func serveEngine(args []string) {
	flags := flag.NewFlagSet("vllm", flag.ExitOnError)
	port := flags.Int("port", 8000, "of OpenAI's API")
	kv := flags.String("kv-events-config", `{"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}`, "as vLLM's")
	flags.Parse(args[2:]) // after serve MODEL
	var config struct {
		Endpoint string
		Replay   string `json:"replay_endpoint"`
	}
	if err := json.Unmarshal([]byte(*kv), &config); err != nil {
		log.Fatal(err)
	}
	here := strings.NewReplacer("*", "127.0.0.1")
	engine, err := enginesim.Start(context.Background(), enginesim.Config{BlockSize: 16, Capacity: 1000,
		Endpoint: here.Replace(config.Endpoint), Replay: here.Replace(config.Replay)})
	if err != nil {
		log.Fatal(err)
	}
	api, err := openaisim.Start("127.0.0.1:0", openaisim.Options{Model: args[1], BlockSize: 16, Tokens: 1,
		Serve: engine.Serve})
	if err != nil {
		log.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle("/", httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: api.Addr}))
	for path, answer := range map[string]string{
		"/health": "", "/version": `{"version":"0.32.0"}`,
		"/kv_event_sources": fmt.Sprintf(
			`{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":%q,"replay_endpoint":%q,"topic":""}}`,
			config.Endpoint, config.Replay),
		"/metrics": `vllm:cache_config_info{block_size="16",effective_attention_block_size="None",engine="0",` +
			"num_gpu_blocks=\"1000\"} 1.0\n",
	} {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, answer) })
	}
	log.Print("ready")
	log.Fatal(http.ListenAndServe(fmt.Sprintf(":%d", *port), mux))
}

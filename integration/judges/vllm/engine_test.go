//go:build realvllm

package vllm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// startPatience is the longest start of an engine; with two busy cores a start takes minutes.
const startPatience = 60 * time.Minute

// model is a model of random weights with the size of the cache.
type model struct {
	name    string
	blocks  int
	learned bool           // the shim reads the addresses and the model from the engine
	config  map[string]any // in addition to the common configuration

	dir string // folder with a tokenizer and weights; empty: a new folder with the configuration alone
}

// models are a model with only full attention, and a model like Gemma 3.
var models = []model{
	{name: "full", blocks: 200, config: map[string]any{
		"architectures": []string{"LlamaForCausalLM"}, "model_type": "llama", "hidden_act": "silu",
		"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false,
	}},
	{name: "hybrid", blocks: 320, learned: true, config: map[string]any{
		"architectures": []string{"Gemma3ForCausalLM"}, "model_type": "gemma3_text",
		"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
		"rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 32, "sliding_window": 128,
		"layer_types": []string{"sliding_attention", "full_attention"}, "pad_token_id": 0,
	}},
}

// Constants of both models.
const (
	layers       = 2
	hidden       = 128
	intermediate = 256
	heads        = 4
	keyHeads     = 2
	headSize     = 32
	blockSize    = 32 // tokens; vLLM's minimum on a CPU
	loraRank     = 8
)

// write makes a model folder for vLLM, if the model has none.
func (m model) write(t *testing.T) string {
	t.Helper()
	if m.dir != "" {
		return m.dir
	}
	dir := t.TempDir()
	m.writeConfig(t, dir)
	return dir
}

func (m model) writeConfig(t *testing.T, dir string) {
	t.Helper()
	config := map[string]any{
		"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
		"num_key_value_heads": keyHeads, "head_dim": headSize, "vocab_size": vocabulary,
		"max_position_embeddings": 4096, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
	}
	for k, v := range m.config {
		config[k] = v
	}
	writeJSON(t, filepath.Join(dir, "config.json"), config)
}

func writeJSON(t *testing.T, path string, v any) {
	t.Helper()
	b, err := json.Marshal(v)
	if err == nil {
		err = os.WriteFile(path, b, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// writeAdapter makes the folder of a LoRA adapter of random weights, in the form of PEFT with safetensors.
func writeAdapter(t *testing.T, seed uint64) string {
	t.Helper()
	dir := t.TempDir()
	writeJSON(t, filepath.Join(dir, "adapter_config.json"), map[string]any{
		"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": loraRank, "lora_alpha": loraRank, "bias": "none",
		"target_modules": []string{"q_proj", "v_proj"}, "base_model_name_or_path": "random",
	})
	weights := newWeights(seed)
	for layer := range layers {
		for module, size := range map[string]int{"q_proj": heads * headSize, "v_proj": keyHeads * headSize} {
			name := fmt.Sprintf("base_model.model.model.layers.%d.self_attn.%s.", layer, module)
			weights.add(name+"lora_A.weight", 0.1, loraRank, hidden)
			weights.add(name+"lora_B.weight", 0.1, size, loraRank)
		}
	}
	weights.write(t, filepath.Join(dir, "adapter_model.safetensors"))
	return dir
}

// engine is a place where a vLLM server runs, dies and is started again: the same ports and the same model.
type engine struct {
	t     *testing.T
	model model
	dir   string // the model's folder
	args  []string
	env   []string

	http, events, replay string // HOST:PORT
	client               http.Client

	cmd  *exec.Cmd
	log  bytes.Buffer // of the present life; read after its end
	done chan struct{}
}

// server is how to run a vLLM server.
type server struct {
	python    string
	blockSize int      // tokens
	args, env []string // in addition to the common arguments
}

// cpuEnvironment are variables of a server on the CPU.
var cpuEnvironment = []string{"VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1"}

// newEngine prepares an engine on the CPU with adapters, without starting a process.
func newEngine(t *testing.T, m model) *engine {
	t.Helper()
	args := []string{
		"--enforce-eager", "--max-model-len", "2048", "--max-num-batched-tokens", "256", "--max-num-seqs", "8",
		"--enable-lora", "--max-loras", fmt.Sprint(len(adapters)), "--max-lora-rank", fmt.Sprint(loraRank), "--lora-modules",
	}
	for i, name := range adapters {
		args = append(args, name+"="+writeAdapter(t, uint64(i)))
	}
	return newPlace(t, m, server{pyenv.VLLM(t), blockSize, args, cpuEnvironment})
}

// newPlace makes a place for an engine. Nothing runs there yet.
func newPlace(t *testing.T, m model, of server) *engine {
	t.Helper()
	e := &engine{
		t: t, model: m, dir: m.write(t), client: http.Client{Timeout: harness.Patience},
		http: loopback.Reserve(t), events: loopback.Reserve(t), replay: loopback.Reserve(t),
	}
	_, httpPort, _ := strings.Cut(e.http, ":")
	_, eventsPort, _ := strings.Cut(e.events, ":")
	config, err := json.Marshal(map[string]any{
		// vLLM binds where there is a *, and dials out elsewhere.
		"enable_kv_cache_events": true, "publisher": "zmq",
		"endpoint": "tcp://*:" + eventsPort, "replay_endpoint": "tcp://" + e.replay,
	})
	if err != nil {
		t.Fatal(err)
	}
	e.args = append([]string{
		"-n", "10", of.python, "-m", "vllm.entrypoints.openai.api_server",
		"--model", e.dir, "--served-model-name", m.name, "--host", "127.0.0.1", "--port", httpPort,
		"--block-size", fmt.Sprint(of.blockSize),
		"--num-gpu-blocks-override", fmt.Sprint(m.blocks), "--disable-uvicorn-access-log",
		"--enable-prompt-tokens-details", "--kv-events-config", string(config),
	}, of.args...)
	if m.dir == "" {
		e.args = append(e.args, "--load-format", "dummy", "--skip-tokenizer-init")
	}
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "PYTHONDONTWRITEBYTECODE=") { // otherwise every start would compile all modules again
			e.env = append(e.env, v)
		}
	}
	home := t.TempDir()
	e.env = append(e.env, "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "VLLM_SERVER_DEV_MODE=1",
		"VLLM_HOST_IP=127.0.0.1", "VLLM_CACHE_ROOT="+home, "VLLM_CONFIG_ROOT="+home, "HF_HOME="+home)
	e.env = append(e.env, of.env...)
	t.Cleanup(func() {
		e.kill()
		if t.Failed() {
			tail := e.log.Bytes()
			t.Logf("end of the engine's output:\n%s", tail[max(0, len(tail)-40_000):])
		}
	})
	return e
}

// start starts the engine and waits for a reply.
func (e *engine) start() {
	e.t.Helper()
	e.begin()
	e.awaitHealth()
}

// begin starts the engine.
func (e *engine) begin() {
	e.t.Helper()
	e.log.Reset()
	e.cmd, e.done = exec.Command("nice", e.args...), make(chan struct{})
	e.cmd.Env, e.cmd.Stdout, e.cmd.Stderr = e.env, &e.log, &e.log
	e.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the children are killed with the process
	if err := e.cmd.Start(); err != nil {
		e.t.Fatal(err)
	}
	go func() {
		_ = e.cmd.Wait() // the process is killed, or the test fails
		close(e.done)
	}()
}

// awaitHealth waits until the engine answers.
func (e *engine) awaitHealth() {
	e.t.Helper()
	deadline := time.After(startPatience)
	for {
		if r, err := e.client.Get("http://" + e.http + "/health"); err == nil {
			r.Body.Close()
			if r.StatusCode == http.StatusOK {
				return
			}
		}
		select {
		case <-e.done:
			e.t.Fatal("the engine has ended")
		case <-deadline:
			e.t.Fatal("the engine does not start")
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// kill ends all of the engine's processes as a crash would.
func (e *engine) kill() {
	if e.cmd == nil || e.cmd.Process == nil {
		return
	}
	_ = syscall.Kill(-e.cmd.Process.Pid, syscall.SIGKILL) // the processes may have ended
	<-e.done
}

// completion is the engine's answer to a request.
type completion struct {
	generated []uint32
	reused    int // tokens
}

// complete makes a request.
func (e *engine) complete(r request) (c completion, err error) {
	body := map[string]any{
		"model": e.model.name, "prompt": r.prompt.tokens, "max_tokens": r.maxTokens, "n": r.n,
		"ignore_eos": true, "return_token_ids": true,
	}
	if r.prompt.lora != "" {
		body["model"] = r.prompt.lora
	}
	if r.prompt.salt != "" {
		body["cache_salt"] = r.prompt.salt
	}
	if r.promptLogprobs {
		body["prompt_logprobs"] = 1
	}
	var answer struct {
		Choices []struct {
			Tokens []uint32 `json:"token_ids"`
		}
		Usage struct {
			Prompt  int `json:"prompt_tokens"`
			Details struct {
				Cached *int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err := e.post("/v1/completions", body, &answer); err != nil {
		return c, err
	}
	if len(answer.Choices) != r.n || answer.Usage.Details.Cached == nil || answer.Usage.Prompt != len(r.prompt.tokens) {
		return c, fmt.Errorf("the engine's answer to %d tokens is %+v", len(r.prompt.tokens), answer)
	}
	return completion{answer.Choices[0].Tokens, *answer.Usage.Details.Cached}, nil
}

func (e *engine) post(path string, body, into any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	r, err := e.client.Post("http://"+e.http+path, "application/json", bytes.NewReader(b))
	if err != nil {
		return err
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %d %s", path, r.StatusCode, text)
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(text, into)
}

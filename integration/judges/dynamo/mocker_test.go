//go:build judges

package dynamo

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/pyenv"
	"github.com/kvatlas/kvatlas/tools/twin"
)

// mockerBlocks is the size of the mocker's cache in blocks: small enough for evictions.
const mockerBlocks = 48

// startMocker runs NVIDIA Dynamo's mocker, an engine without a model, and its frontend. The mocker listens on all
// addresses, and requests use loopback. The tokenizer of the model "m" is made by the test and has numbers as words.
// Prompts are sent as tokens.
func startMocker(t *testing.T) (base, engine, replay string) {
	t.Helper()
	python := pyenv.PythonWith(t, "dynamo-mocker.txt")
	dir := t.TempDir()
	words := map[string]int{}
	for i := range 1000 {
		words[fmt.Sprint("t", i)] = i
	}
	for name, content := range map[string]any{
		"tokenizer.json": map[string]any{"version": "1.0", "added_tokens": []any{},
			"pre_tokenizer": map[string]any{"type": "WhitespaceSplit"},
			"model":         map[string]any{"type": "WordLevel", "vocab": words, "unk_token": "t0"}},
		"tokenizer_config.json": map[string]any{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0",
			"eos_token": "t2", "chat_template": "x"},
		"generation_config.json": map[string]any{"bos_token_id": 1, "eos_token_id": 2},
		"config.json": map[string]any{"model_type": "llama", "architectures": []string{"LlamaForCausalLM"},
			"max_position_embeddings": 8192,
			"hidden_size":             64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
			"vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 2},
	} {
		text, err := json.Marshal(content)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	base, engine, replay = loopback.Reserve(t), loopback.Reserve(t), loopback.Reserve(t)
	port := func(addr string) string { return addr[strings.LastIndexByte(addr, ':')+1:] }
	planes := []string{"--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"}
	env := append(os.Environ(), "DYN_FILE_KV="+t.TempDir(), "HF_HUB_OFFLINE=1", "DYN_TCP_RPC_HOST=127.0.0.1",
		"DYN_SELF_HOST_METADATA=0")
	for _, args := range [][]string{
		{"-m", "dynamo.mocker", "--model-path", dir, "--model-name", "m", "--block-size", fmt.Sprint(harness.BlockSize),
			"--num-gpu-blocks-override", fmt.Sprint(mockerBlocks),
			"--zmq-kv-events-ports", port(engine), "--zmq-replay-ports", port(replay), "--speedup-ratio", "1000"},
		{"-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", port(base)},
	} {
		var said bytes.Buffer
		cmd := exec.Command(python, append(args, planes...)...)
		cmd.Stdout, cmd.Stderr, cmd.Env = &said, &said, env
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
			if t.Failed() {
				t.Logf("output of %s:\n%s", args[1], &said)
			}
		})
	}
	for deadline := time.Now().Add(harness.Patience); ; time.Sleep(100 * time.Millisecond) {
		if status, text, err := harness.Request(base, "GET", "/v1/models", ""); err == nil && status == 200 &&
			strings.Contains(text, `"m"`) {
			return base, "tcp://" + engine, "tcp://" + replay
		}
		if time.Now().After(deadline) {
			t.Fatal("the mocker's model does not appear")
		}
	}
}

// TestDynamoMockerAsEngine serves random prompts with Dynamo's mocker. Its events omit fields (no medium, no LoRA), and
// its small cache evicts. The events go through a shim to the index, and directly to a naive twin. Every answer must be
// the twin's, and the mocker's number of cached tokens must be equal to the earlier answer of the index.
func TestDynamoMockerAsEngine(t *testing.T) {
	base, engine, replay := startMocker(t)
	x := harness.StartIndexer(t, t.TempDir(), "")
	ctx, cancel := context.WithCancel(t.Context())
	// without heartbeats, the connection to a paused mocker stays open
	sub, err := zmtp.DialSub(ctx, engine, []string{""}, zmtp.Config{Heartbeat: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Stop()
	defer cancel()
	if m, err := sub.Recv(ctx); err != nil || m.Kind != zmtp.Opened {
		t.Fatal(m, err)
	}
	shim := harness.Start(t, "worker-shim", "run", "--engine", engine, "--replay", replay, "--worker", "mocker",
		"--model", "m", "--block-size", fmt.Sprint(harness.BlockSize), "--nats", x.NATS)
	shim.WaitFor("connected to the engine")

	decoder, err := events.NewDecoder(events.DecoderConfig{Engine: events.VLLM, BlockSize: harness.BlockSize})
	if err != nil {
		t.Fatal(err)
	}
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	judge := twin.New(twin.Config{MaxPending: radix.DefaultMaxPending,
		MaxTombstones: radix.DefaultMaxTombstones, TombstoneFor: radix.DefaultTombstoneFor}, harness.BlockSize)
	next, removed := uint64(0), 0
	listen := func() { // reads the received messages
		for sub.Queued() > 0 {
			m, err := sub.Recv(ctx)
			if err != nil || m.Kind != zmtp.Data || len(m.Frames) != 3 {
				t.Fatalf("the mocker's socket: %v %v", m, err)
			}
			if seq := binary.BigEndian.Uint64(m.Frames[1]); seq != next {
				t.Fatalf("message %d arrived in place of %d: the twin misses messages", seq, next)
			}
			next++
			message, err := decoder.Decode(m.Frames[2])
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range message.Events {
				if e.Kind == events.Removed {
					removed += len(e.Blocks)
				}
			}
			judge.Apply(1, message.Events)
		}
	}

	// known waits until the index has the twin's answer for a prompt, with at least the given number of blocks.
	known := func(p []uint32, least int) int {
		for deadline := time.Now().Add(harness.Patience); ; time.Sleep(time.Millisecond) {
			listen()
			want, got := int(judge.Match(hasher.Hash(nil, p))[0]), int(harness.OverlapOf(t, x, "m", "mocker",
				harness.Prompt{Tokens: p}).Device)
			if got == want && got >= least {
				return got
			}
			if time.Now().After(deadline) {
				t.Fatalf(
					"of a prompt of %d tokens the twin has %d blocks, the index has %d, want at least %d",
					len(p), want, got, least)
			}
		}
	}

	// serve sends a prompt to the mocker and returns the number of cached tokens.
	serve := func(p []uint32) int {
		status, text, err := harness.Request(base, "POST", "/v1/completions",
			fmt.Sprintf(`{"model":"m","prompt":%s,"max_tokens":1,"ignore_eos":true}`, harness.JSONList(p)))
		var said struct {
			Usage struct {
				Details struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		if err != nil || status != 200 || json.Unmarshal([]byte(text), &said) != nil {
			t.Fatalf("completion: %d %s %v", status, text, err)
		}
		return said.Usage.Details.Cached
	}

	rng := rand.New(rand.NewPCG(3, 1))
	var past [][]uint32
	hits, served := 0, 0
	for range 80 {
		var p []uint32
		for i := range 1 + rng.IntN(8) {
			variant := rng.IntN(2)
			for j := range harness.BlockSize {
				p = append(p, uint32(3+(31*i+517*variant+7*j)%990))
			}
		}
		if len(past) > 0 && rng.IntN(2) == 0 {
			p = past[len(past)-1-rng.IntN(min(len(past), 6))]
		}
		past = append(past, p)
		expect := known(p, 0)
		found := serve(p)
		served++
		if expect > 0 {
			hits++
		}
		// A prompt's last token is computed in any case.
		if credited := min(expect, (len(p)-1)/harness.BlockSize) * harness.BlockSize; found != credited {
			t.Errorf("of a prompt of %d tokens the index has %d blocks, but the mocker found %d tokens cached, not %d",
				len(p), expect, found, credited)
		}
		// A fully cached prompt may have evicted another block. The mocker may announce the eviction later, but before the
		// events of the next prompt.
		mark := make([]uint32, harness.BlockSize+1)
		for i := range mark {
			mark[i] = 999
		}
		mark[0] = uint32(3 + served)
		serve(mark)
		known(mark, 1)
	}
	t.Logf("%d of %d hit, %d removed", hits, served, removed)
	if hits < served/4 || hits == served || removed < 10 {
		t.Errorf("%d requests with %d hits and %d blocks removed are no test", served, hits, removed)
	}
}

//go:build judges

package mooncake

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// TestVLLMStoreInAnswers puts the blocks that vLLM's connector would store into a real Mooncake master. The index finds
// the blocks by the digests that the node computes from a query's tokens and the workers' registrations. If the node
// cannot compute digests, the answer has the reason.
func TestVLLMStoreInAnswers(t *testing.T) {
	real := pyenv.StartMooncake(t)
	real.StartClient()
	host, port, err := net.SplitHostPort(real.HTTP)
	if err != nil {
		t.Fatal(err)
	}
	metrics, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	of := func(change func(*hicache.VLLM)) hicache.Config {
		v := hicache.VLLM{ModelName: "org/m", TPSize: 2, PPSize: 1, NumKVHead: 2,
			Groups:        []hicache.Group{{Kind: hicache.Full, BlockSize: harness.BlockSize}},
			HashBlockSize: harness.BlockSize, SchedulerBlockSize: harness.BlockSize, EngineVersion: "0.32.0",
			Master: hicache.Master{Address: host + ":1", MetricsPort: metrics}}
		change(&v)
		return hicache.Config{VLLM: &v}
	}
	plain := of(func(*hicache.VLLM) {})
	prompt := harness.Tokens(700, 12*harness.BlockSize+3)
	p, err := plain.Prompt(prompt, "", "", harness.BlockSize)
	if err != nil {
		t.Fatal(err)
	}
	names := p.Lanes[0].Names
	real.Put(append(names(0, 8).Keys, names(9, 12).Keys...)...)

	x := harness.StartIndexer(t, t.TempDir(), "")
	e, ahead := harness.StartSimEngine(t), harness.StartSimEngine(t)
	harness.StartSimShim(t, e, x.NATS, "w1", "--l3-config", harness.WriteWorkerStore(t, plain))
	harness.StartSimShim(t, ahead, x.NATS, "w2", "--l3-config", harness.WriteWorkerStore(t, plain))
	harness.ServePrompt(t, e, prompt[:2*harness.BlockSize])
	harness.ServePrompt(t, ahead, prompt[:10*harness.BlockSize])
	x.WaitDepth(t, "m", prompt, "w1", 2)
	a := x.WaitDepth(t, "m", prompt, "w2", 10)
	if fmt.Sprint(a.L3.Ranges) != "[[0 8] [9 12]]" || a.L3.Status != api.L3OK || a.L3.FromStart != 8 ||
		len(a.Workers) != 2 {
		t.Fatalf("the store: %+v", a)
	}
	for _, o := range a.Workers {
		if want := map[string]string{"w1": "6 not_in_store", "w2": "0 gap"}[string(o.Instance)]; fmt.Sprintf("%d %s",
			o.L3, o.L3Stop) != want {
			t.Errorf("%s would load %d, %s; want %s", o.Instance, o.L3, o.L3Stop, want)
		}
	}
	for _, c := range []struct {
		args, want string
	}{
		{"--hashes 5", "need tokens"},
		{"--lora x --tokens " + harness.CommaList(prompt), "path of a LoRA adapter"},
	} {
		if a, failure := x.Query(t, append([]string{"--model", "m"}, strings.Fields(c.args)...)...); failure != nil ||
			a.L3.Status != api.L3Unavailable || !strings.Contains(a.L3.Reason, c.want) {
			t.Errorf("%.20s: %+v, %v", c.args, a.L3, failure)
		}
	}
	if a, failure := x.Query(t, "--model", "m", "--cache-salt", "other", "--tokens",
		harness.CommaList(prompt)); failure != nil || a.L3.Status != api.L3OK || a.L3.Total != 0 {
		t.Errorf("another tenant's: %+v, %v", a.L3, failure)
	}
	second := harness.Start(t, "indexer", "serve", "--nats", "nats://"+x.NATS, "--http-listen", "127.0.0.1:0",
		"--node-id", "second",
		"--l3-config", harness.WriteStores(t,
			map[string]hicache.Config{"m": of(func(v *hicache.VLLM) { v.EngineVersion = "0.28.1" })}))
	web := second.WaitFor(`HTTP is served" listen=(\S+)`)[1]
	second.WaitFor("msg=ready")
	status, text, err := harness.Request(web, "POST", "/v1/find", `{"model":"m","tokens":`+harness.JSONList(prompt)+`}`)
	if err != nil || status != 200 || !strings.Contains(text, `"status":"unavailable"`) ||
		!strings.Contains(text, "random in each process") {
		t.Errorf("a random seed: %d %s %v", status, text, err)
	}
}

// TestDemoOnMooncake runs the demonstration with a real Mooncake master as the shared store.
func TestDemoOnMooncake(t *testing.T) {
	python, libraries := pyenv.MooncakePython(t)
	harness.DemoWithStore(t, "mooncake_master", []string{"LD_LIBRARY_PATH=" + libraries}, "--requests", "40",
		"--block-size", "64", "--capacity", "500", "--l3-python", python)
}

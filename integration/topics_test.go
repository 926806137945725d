package integration

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/zmtpserver"
)

// central is a shim for engines that connect to it.
type central struct {
	t     *testing.T
	x     *harness.Indexer
	shim  *harness.Process
	where string // the shim's endpoint
}

func startCentral(t *testing.T, x *harness.Indexer, args ...string) *central {
	t.Helper()
	c := &central{t: t, x: x}
	c.shim = harness.Start(t, "worker-shim", append([]string{"run", "--nats", x.NATS, "--engine", "tcp://127.0.0.1:0",
		"--listen"}, args...)...)
	c.where = c.shim.WaitFor(`engines may dial in.*listen=(\S+)`)[1]
	return c
}

// engine starts a simulated engine that connects, and waits for the subscription.
func (c *central) engine(cfg enginesim.Config) *enginesim.Engine {
	c.t.Helper()
	cfg.Endpoint, cfg.Dial, cfg.NoReplay = c.where, true, true
	e, err := enginesim.Start(context.Background(), cfg)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(e.Crash)
	c.connected(e)
	return e
}

func (c *central) connected(e *enginesim.Engine) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), harness.Patience)
	defer cancel()
	if err := e.WaitSubscribers(ctx, 1); err != nil {
		c.t.Fatal(err)
	}
}

// dialIn opens a publisher for messages that no simulated engine sends.
func dialIn(t *testing.T, where string) *zmtpserver.Pub {
	t.Helper()
	pub, err := zmtpserver.DialPub(context.Background(), where, zmtp.Config{Heartbeat: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pub.Stop)
	ctx, cancel := context.WithTimeout(context.Background(), harness.Patience)
	defer cancel()
	if err := pub.WaitSubscribers(ctx, 1); err != nil {
		t.Fatal(err)
	}
	return pub
}

func number(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }

// depths returns the blocks of a prompt on every rank of a model, by key.
func (c *central) depths(model string, prompt []uint32) (map[string]int, error) {
	var a api.Answer
	if err := harness.HTTPDo(c.x.HTTP, "POST", "/v1/find", api.Query{Model: model, Tokens: prompt}, &a); err != nil {
		if strings.Contains(err.Error(), "unknown_model") {
			return nil, nil
		}
		return nil, err
	}
	got := map[string]int{}
	for _, o := range a.Workers {
		if o.Device > 0 {
			got[events.RankKey{Instance: o.Instance, Rank: o.Rank}.String()] = int(o.Device)
		}
	}
	return got, nil
}

// simulatedFleet maps the ranks' keys to the engines with their models.
type simulatedFleet map[string]modelEngine

type modelEngine struct {
	model  string
	engine *enginesim.Engine
}

// agrees waits until every answer has the engines' blocks.
func (c *central) agrees(when string, fleet simulatedFleet, models []string, prompts [][]uint32) {
	c.t.Helper()
	for _, model := range models {
		for i, prompt := range prompts {
			want := map[string]int{}
			for key, f := range fleet {
				if n := f.engine.Hit(prompt); n > 0 && f.model == model {
					want[key] = n
				}
			}
			harness.Eventually(c.t, fmt.Sprintf("%s: prompt %d of %s is answered exactly", when, i, model),
				func() (bool, string) {
					got, err := c.depths(model, prompt)
					return err == nil && fmt.Sprint(got) == fmt.Sprint(want),
						fmt.Sprintf("%v, %v\nwant %v\n%s", got, err, want, c.shim.Said())
				})
		}
	}
}

// TestFiftyEnginesAtOneShim connects 50 engines of two models, two of them with two ranks, to a shim. Engines evict,
// restart, end and return, while another publisher sends unknown topics. Every answer must have the engines' blocks.
func TestFiftyEnginesAtOneShim(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	// Restarted engines reconnect within this time, also on a busy machine. Otherwise they count as gone until their first
	// message.
	c := startCentral(t, x, "--block-size", "16", "--engine-gone-after", "10s")
	rng := rand.New(rand.NewPCG(50, 1))
	models := []string{"org/m@1", "n"}
	fleet := simulatedFleet{}
	var keys []string
	for i := range 50 {
		pod, rank := fmt.Sprintf("10.0.0.%d:8000", i), events.Rank(0)
		switch {
		case i < 10: // without a port
			pod = fmt.Sprintf("10.0.0.%d", i)
		case i < 12:
			pod = fmt.Sprintf("[fd00::%x]:8000", i)
		case i >= 48: // second ranks of the two before
			pod, rank = fmt.Sprintf("10.0.0.%d:8000", i-2), 1
		}
		model := models[i%2]
		key := events.RankKey{Instance: events.WorkerID(pod), Rank: rank}.String()
		one := fleet[key]
		one.model = model
		one.engine = c.engine(enginesim.Config{Topic: "kv@" + pod + "@" + model, Capacity: 24, Rank: rank,
			Release: enginesim.Release(i % 3), Seed: uint64(i), SeedPerLife: true})
		fleet[key] = one
		keys = append(keys, key)
	}
	var prompts [][]uint32
	for i := range 8 {
		shared := harness.Tokens(1, 2*16)
		prompts = append(prompts, append(shared, harness.Tokens(1000*(i+1), (2+i)*16)...))
	}
	stranger := dialIn(t, c.where)
	var seq uint64
	serve := func(keys []string, rounds int) {
		t.Helper()
		for round := range rounds {
			for _, key := range keys {
				if round == 0 || rng.IntN(3) > 0 {
					harness.ServePrompt(t, fleet[key].engine, prompts[rng.IntN(len(prompts))])
				}
				topic := []string{"kv@\xff@m", "kv@@n", "", "kv-events", "kv@" + strings.Repeat("w", 300) + "@n",
					"kv@a\nb@n", "KV@w@n", "kv@w"}[rng.IntN(8)]
				_ = stranger.Send([]byte(topic), number(seq), []byte{0xc1})
				seq++
			}
		}
	}
	serve(keys, 6)
	c.agrees("at first", fleet, models, prompts)

	for _, key := range keys[:10] { // these restart at once
		if err := fleet[key].engine.Restart(); err != nil {
			t.Fatal(err)
		}
		c.connected(fleet[key].engine)
	}
	for _, key := range keys[10:20] {
		fleet[key].engine.Crash()
	}
	c.agrees("with ten ended and ten empty restarted engines", fleet, models, prompts)
	serve(append(append([]string{}, keys[:10]...), keys[20:]...), 3)
	c.agrees("with ten gone", fleet, models, prompts)
	harness.Eventually(t, "ended engines have no lease", func() (bool, string) {
		list := harness.IndexerJSON[api.WorkerList](t, x.NATS, "workers").Workers
		n := 0
		for _, w := range list {
			if w.Lease != nil && w.Lease.State == "held" {
				n++
			}
		}
		return n == 40, fmt.Sprintf("%d leases: %+v", n, list)
	})
	for _, key := range keys[10:15] {
		if err := fleet[key].engine.Restart(); err != nil {
			t.Fatal(err)
		}
		c.connected(fleet[key].engine)
	}
	serve(append(append([]string{}, keys[:15]...), keys[20:]...), 2)
	c.agrees("with five back", fleet, models, prompts)
	if said := c.shim.Said(); !strings.Contains(said, "messages with a topic without an engine are skipped") {
		t.Errorf("the log has no line about unknown topics:\n%s", said)
	}
}

// TestKeysOfManyEngines serves three engines with restricted NATS keys: a pool of a single model, and a single worker's
// key. Permitted engines are served, and the shim reports forbidden engines without other effects.
func TestKeysOfManyEngines(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	keys := filepath.Join(dir, "keys")
	example := harness.Run(t, "indexer", "auth", "create", "--shim", "w1", "--pool", "fan", "--model", "m",
		"--keys", keys)
	if example.Code != 0 {
		t.Fatal(example.Stderr)
	}
	addr, config := loopback.Reserve(t), filepath.Join(dir, "nats.conf")
	text := fmt.Sprintf("listen: %q\njetstream { store_dir: %q, max_file_store: 64GB }\n%s", addr,
		filepath.Join(dir, "data"), example.Stdout)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	harness.Start(t, "nats-server", "-c", config).WaitFor(`Server is ready`)
	as := func(user string) []string {
		return []string{"--nats-nkey", filepath.Join(keys, "default-"+user+".nk"), "--nats-inbox-prefix", "_INBOX_" + user}
	}
	node := harness.Start(t, "indexer", append(as("node"), "serve", "--nats", addr, "--http-listen", "127.0.0.1:0")...)
	x := &harness.Indexer{Process: node, NATS: addr, HTTP: node.WaitFor(`HTTP is served" listen=(\S+)`)[1]}
	node.WaitFor(`msg=ready`)
	prompt := harness.Tokens(1, 3*16)
	for _, user := range []string{"shim-w1", "pool-fan"} {
		c := startCentral(t, x, append(as(user), "--block-size", "16")...)
		fleet := simulatedFleet{}
		var engines []*enginesim.Engine
		for i, topic := range []string{"kv@w1@m", "kv@w2@m", "kv@w3@other"} {
			e := c.engine(enginesim.Config{Topic: topic, Seed: uint64(i)})
			engines = append(engines, e)
			harness.ServePrompt(t, e, prompt)
			if topic == "kv@w1@m" || topic == "kv@w2@m" && user == "pool-fan" {
				fleet[strings.Split(topic, "@")[1]+"/0"] = modelEngine{"m", e}
			}
		}
		c.agrees(user, fleet, []string{"m", "other"}, [][]uint32{prompt})
		c.shim.WaitFor("worker=w3.*indexer auth create --pool NAME --model other")
		c.shim.Stop()
		for _, e := range engines {
			e.Crash()
		}
	}
}

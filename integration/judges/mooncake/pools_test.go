//go:build judges

package mooncake

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/ingest/sharedstore"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// poolQuestion is a question of hicache_pools.py.
type poolQuestion struct {
	TP      int         `json:"tp"`
	PP      int         `json:"pp"`
	MLA     bool        `json:"mla"`
	Model   string      `json:"model"`
	Tag     *string     `json:"tag"`
	Page    int         `json:"page"`
	Logical bool        `json:"logical"`
	Hashes  []string    `json:"hashes"`
	Own     int         `json:"own"`
	Pools   []poolOfTwo `json:"pools"`

	tokens []uint32
}

type poolOfTwo struct {
	Pool     string     `json:"pool"`
	Trailing int        `json:"trailing"`
	MLA      bool       `json:"mla"`
	There    [][]string `json:"there"`
}

// poolAnswer is the answer to a poolQuestion.
type poolAnswer struct {
	Layout   json.RawMessage     `json:"layout"`
	Suffixes map[string][]string `json:"suffixes"`
	Pages    int                 `json:"pages"`
}

// kinds are models by their pools: without a layout (MHA, MLA), with the layout that SGLang serves, and with a layout
// written by hand. SGLang serves no layout if keys contain ranks.
var kinds = []struct {
	name    string
	mla     bool
	logical bool
	pools   []string // with a tilde: only the last pages
	objects int      // objects of a page in a pool of a rank without MLA
}{
	{"mha", false, false, []string{"kv"}, 2},
	{"mla", true, false, []string{"kv"}, 1},
	{"dsa", true, false, []string{"kv", "indexer"}, 1},
	{"dsa with a draft", true, false, []string{"kv", "indexer", "draft", "draft_indexer"}, 1},
	{"mla with a window", true, false, []string{"kv", "~swa"}, 1},
	{"dsv4", true, true, []string{"deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128", "~swa",
		"~deepseek_v4_c4_state"}, 1},
	{"windows alone", true, true, []string{"~swa"}, 1},
	{"mha with a window", false, false, []string{"kv", "~swa"}, 2},
	{"mha with states", false, false, []string{"kv", "~mamba"}, 2},
}

// TestPoolsEqualSGLang checks models with every kind of pools, with random objects of a prompt in a real master and
// random own pages of a worker. The credited pages must be the pages that SGLang's own storage class would load.
func TestPoolsEqualSGLang(t *testing.T) {
	t.Parallel()
	m := pyenv.StartMooncake(t)
	ask := startPools(t, m)
	master, err := sharedstore.NewMooncake(sharedstore.MooncakeConfig{Address: m.HTTP})
	if err != nil {
		t.Fatal(err)
	}
	seed := uint64(35)
	rng := rand.New(rand.NewPCG(seed, 23))
	const rounds = 20
	loaded, lookups := map[string]int{}, 0
	for round := range rounds {
		var questions []poolQuestion
		for i := range kinds {
			questions = append(questions, question(rng, i, fmt.Sprintf("r%d-%d", round, i)))
		}
		for i, a := range ask(questions) {
			q := &questions[i]
			got := credited(t, master, q, &a)
			if lookups++; got != a.Pages {
				t.Errorf("%s, seed %d, round %d: a worker is credited with %d pages, SGLang loads %d of %d, own %d\n%+v\n%s",
					kinds[i].name, seed, round, got, a.Pages, len(q.Hashes), q.Own, q.Pools, a.Layout)
			}
			if a.Pages > 0 && a.Pages < len(q.Hashes)-q.Own {
				loaded[kinds[i].name]++
			}
		}
	}
	t.Logf("%d look-ups, seed %d; some but not all pages are loaded in %v", lookups, seed, loaded)
	for _, k := range kinds {
		if loaded[k.name] < rounds/10 {
			t.Errorf("%s: only %d questions with a partial load", k.name, loaded[k.name])
		}
	}
}

// question returns a question about a random prompt of a kind of model.
func question(rng *rand.Rand, kind int, tag string) poolQuestion {
	k := &kinds[kind]
	q := poolQuestion{TP: 1 + rng.IntN(2), PP: 1 + rng.IntN(2), MLA: k.mla, Model: "org/model-7b", Tag: &tag, Page: 16,
		Logical: k.logical, tokens: harness.Tokens(rng.IntN(1<<20), 16*(4+rng.IntN(12)))}
	c := hicache.SGLang{PageSize: q.Page}
	for _, h := range c.PageHashes(nil, q.tokens, hicache.Space{}) {
		q.Hashes = append(q.Hashes, h.String())
	}
	q.Own = rng.IntN(len(q.Hashes)/2 + 1)
	window := 1 + rng.IntN(4)
	for _, name := range k.pools {
		p := poolOfTwo{Pool: name, MLA: k.mla}
		objects, missing := k.objects, 40
		if name[0] == '~' {
			p.Pool, p.Trailing, missing = name[1:], window, 8
		}
		if p.Pool == "mamba" {
			p.Trailing, objects, missing = 1, 3, 4
		}
		for rank := range q.PP * q.TP {
			var there []string
			for page := range q.Hashes {
				bits := bytes.Repeat([]byte("1"), objects)
				if shared := k.mla && rank%q.TP > 0; shared { // every tensor rank has the same objects
					bits = []byte(p.There[rank-1][page])
				} else if rng.IntN(missing) == 0 {
					bits[rng.IntN(objects)] = '0'
				}
				there = append(there, string(bits))
			}
			p.There = append(p.There, there)
		}
		q.Pools = append(q.Pools, p)
	}
	return q
}

// credited returns the credited pages of a worker with the engine's registration.
func credited(t *testing.T, master hicache.Store, q *poolQuestion, a *poolAnswer) int {
	t.Helper()
	layout := a.Layout
	var served struct{ Enabled bool }
	if err := json.Unmarshal(layout, &served); err != nil {
		t.Fatal(err)
	}
	if !served.Enabled && len(q.Pools) > 1 { // by hand
		pools := []hicache.Pool{}
		for _, p := range q.Pools {
			policy := hicache.AllPages
			if p.Trailing > 0 {
				policy = hicache.TrailingPages
			}
			pools = append(pools, hicache.Pool{Pool: p.Pool, Suffixes: a.Suffixes[p.Pool], Policy: policy,
				TrailingPages: p.Trailing})
		}
		var err error
		if layout, err = json.Marshal(hicache.ObjectLayout{Pools: pools}); err != nil {
			t.Fatal(err)
		}
	}
	text, err := json.Marshal(map[string]any{"sglang_hicache_mooncake": map[string]any{"backend": "mooncake",
		"page_size": q.Page, "tp_size": q.TP, "pp_size": q.PP, "is_mla_model": q.MLA, "engine_version": "0.5.23",
		"model_name": q.Model, "extra_backend_tag": q.Tag, "prefetch_threshold": 1, "hicache_object_layout": layout}})
	if err != nil {
		t.Fatal(err)
	}
	c, passed, err := hicache.ParseConfig(text)
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	for _, field := range passed {
		if field != "is_mla_backend" {
			t.Errorf("%s of SGLang's layout is unknown", field)
		}
	}
	prompt, err := c.Prompt(q.tokens, "", "", uint32(q.Page))
	if err != nil {
		t.Fatal(err)
	}
	cache := hicache.NewCache(master, hicache.CacheConfig{})
	var found []hicache.Found
	for _, lane := range prompt.Lanes {
		asked := cache.Begin(lane, q.Own)
		if prompt.Unbroken {
			asked.Follow(t.Context(), []int{q.Own})
		} else {
			asked.Ask(0, lane.Pages)
		}
		f := asked.Wait(t.Context())
		if f.Err != nil {
			t.Fatal(f.Err)
		}
		found = append(found, f)
	}
	pages, _ := prompt.Map(found).Load(uint32(q.Own), c.Rule())
	return int(pages)
}

// startPools starts hicache_pools.py beside a master.
func startPools(t *testing.T, m *pyenv.Mooncake) (ask func([]poolQuestion) []poolAnswer) {
	python, libraries := pyenv.MooncakePython(t)
	options, err := json.Marshal(map[string]string{"wheel": pyenv.Wheel(t, "sglang==0.5.23"), "master": m.RPC()})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(python, pyenv.Script(t, "hicache_pools.py"), string(options))
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "LD_LIBRARY_PATH="+libraries)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	guard := time.AfterFunc(6*harness.Patience, func() { _ = cmd.Process.Kill() })
	t.Cleanup(func() {
		guard.Stop()
		in.Close()
		_ = cmd.Wait() // the client's library may end with a signal
	})
	out := bufio.NewReader(pipe)
	return func(questions []poolQuestion) (answers []poolAnswer) {
		t.Helper()
		b, err := json.Marshal(questions)
		if err == nil {
			_, err = in.Write(append(b, '\n'))
		}
		for err == nil {
			var line []byte
			if line, err = out.ReadBytes('\n'); err == nil && line[0] == '@' { // other lines are output of the library
				if err = json.Unmarshal(line[1:], &answers); err == nil {
					return answers
				}
			}
		}
		if err == io.EOF {
			err = fmt.Errorf("hicache_pools.py has ended")
		}
		t.Fatal(err)
		return nil
	}
}

//go:build judges

package engines

import (
	"bufio"
	"encoding/json"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// storeCode is a script of integration/python that runs an engine's own store code from a wheel.
type storeCode struct {
	t      *testing.T
	script string
	in     io.Writer
	out    *bufio.Reader
}

// startStoreCode starts hicache.py, which computes names of blocks and hits.
func startStoreCode(t *testing.T, wheel string) *storeCode {
	return startStoreScript(t, "hicache.py", wheel, map[string]any{})
}

func startStoreScript(t *testing.T, script, wheel string, options map[string]any) *storeCode {
	options["wheel"] = pyenv.Wheel(t, wheel)
	arg, err := json.Marshal(options)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(pyenv.PythonWith(t, "engines.txt"), pyenv.Script(t, script), string(arg))
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	guard := time.AfterFunc(3*harness.Patience, func() { _ = cmd.Process.Kill() })
	t.Cleanup(func() {
		guard.Stop()
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("%s: %v", script, err)
		}
	})
	return &storeCode{t: t, script: script, in: in, out: bufio.NewReader(out)}
}

// ask sends a line of questions and decodes the line of answers.
func (s *storeCode) ask(questions, answers any) {
	s.t.Helper()
	b, err := json.Marshal(questions)
	if err == nil {
		_, err = s.in.Write(append(b, '\n'))
	}
	if err != nil {
		s.t.Fatal(err)
	}
	line, err := s.out.ReadBytes('\n')
	if err != nil {
		s.t.Fatalf("no reply from %s: %v", s.script, err)
	}
	if err := json.Unmarshal(line, answers); err != nil {
		s.t.Fatalf("%s: %s: %v", s.script, line, err)
	}
}

// TestPageHashesEqualSGLang compares page hashes with SGLang's own hash, in Python up to 0.5.12. Namespaces exist from
// 0.5.23 on, whose hash is in C++.
func TestPageHashesEqualSGLang(t *testing.T) {
	t.Parallel()
	type space struct {
		ExtraKey *string `json:"extra_key"`
		Salt     *string `json:"salt"`
	}
	text := func(s string) *string { return &s }
	spaces := []space{{}, {ExtraKey: text("lora1")}, {Salt: text("tenant-a")}, {text("lora1"), text("tenant-a")},
		{text(""), text("é")}}
	var seeds []struct{ Seed *string }
	startStoreCode(t, "sglang==0.5.23").ask(spaces, &seeds)

	type question struct {
		Tokens []uint32 `json:"tokens"`
		Page   int      `json:"page"`
		Eagle  bool     `json:"eagle"`
		Prior  *string  `json:"prior"`
		space  int
	}
	rng := rand.New(rand.NewPCG(5, 12))
	var questions []question
	for i := range 300 {
		q := question{Tokens: make([]uint32, rng.IntN(80)), Page: []int{1, 2, 3, 4, 7, 16, 64}[rng.IntN(7)],
			Eagle: i%2 == 1, space: rng.IntN(len(spaces))}
		q.Prior = seeds[q.space].Seed
		for j := range q.Tokens {
			q.Tokens[j] = rng.Uint32() >> rng.IntN(32)
		}
		questions = append(questions, q)
	}
	var answers []struct{ Hashes []string }
	startStoreCode(t, "sglang==0.5.12").ask(questions, &answers)
	for i, q := range questions {
		c := hicache.SGLang{PageSize: q.Page, IsEagle: q.Eagle}
		var got []string
		for _, h := range c.PageHashes(nil, q.Tokens, hicache.Space{ExtraKey: spaces[q.space].ExtraKey,
			CacheSalt: spaces[q.space].Salt}) {
			got = append(got, h.String())
		}
		if !slices.Equal(got, answers[i].Hashes) {
			t.Errorf("question %d (%+v): %v, want %v", i, q, got, answers[i].Hashes)
		}
	}
}

// TestObjectKeysEqualSGLang compares a page's keys with the keys that all ranks of a worker look up in their store.
func TestObjectKeysEqualSGLang(t *testing.T) {
	t.Parallel()
	type question struct {
		Hash  string  `json:"hash"`
		TP    int     `json:"tp"`
		PP    int     `json:"pp"`
		MLA   bool    `json:"mla"`
		LCM   *int    `json:"lcm"`
		Split bool    `json:"split"`
		Tag   *string `json:"tag"`
		Model string  `json:"model"`
	}
	page := (&hicache.SGLang{PageSize: 1}).PageHashes(nil, []uint32{7}, hicache.Space{})
	var questions []question
	for _, tp := range []int{1, 2, 3, 4} {
		for _, pp := range []int{1, 2, 3} {
			for _, tag := range []string{"", "blue", "a_b-c.d"} {
				q := question{Hash: page[0].String(), TP: tp, PP: pp, Model: "org/Model-7B"}
				if tag != "" {
					q.Tag = &tag
				}
				mla := q
				mla.MLA = true
				questions = append(questions, q, mla)
				for shares := 1; shares <= 4; shares++ { // of the heads of a rank
					lcm := shares * tp
					split := q
					split.Split, split.LCM = true, &lcm
					unsplit, one := split, mla // the ranks must not matter for these
					unsplit.Split, one.LCM = false, &lcm
					questions = append(questions, split, unsplit, one)
				}
			}
		}
	}
	for _, version := range []string{"0.5.12", "0.5.23"} {
		var answers []struct{ Keys []string }
		startStoreCode(t, "sglang=="+version).ask(questions, &answers)
		for i, q := range questions {
			c := hicache.Config{SGLang: &hicache.SGLang{Backend: "mooncake", PageSize: 1, TPSize: q.TP, PPSize: q.PP,
				IsMLA:            q.MLA,
				ShouldSplitHeads: q.Split, ModelName: q.Model, EngineVersion: version}}
			if q.LCM != nil {
				c.SGLang.TPLCMSize = *q.LCM
			}
			if q.Tag != nil {
				c.SGLang.ExtraBackendTag = *q.Tag
			}
			if err := c.Check(); err != nil {
				t.Fatal(err)
			}
			if got := c.SGLang.Keys(page).Keys; !slices.Equal(got, answers[i].Keys) {
				t.Errorf("%s, question %d (%+v):\n%v, want\n%v", version, i, q, got, answers[i].Keys)
			}
		}
	}
}

// TestLoadEqualsSGLang runs prefetches of SGLang's own controller from stores with some pages of a prompt.
func TestLoadEqualsSGLang(t *testing.T) {
	t.Parallel()
	type question struct {
		Page      int    `json:"page"`
		Threshold int    `json:"threshold"`
		Pages     string `json:"pages"`
	}
	rng := rand.New(rand.NewPCG(5, 128))
	var questions []question
	for range 400 {
		pages := make([]bool, rng.IntN(400))
		for i := range pages {
			pages[i] = rng.IntN(150) > 0
		}
		q := question{Page: []int{1, 16, 64, 300}[rng.IntN(4)], Threshold: []int{256, 256, 1, 100, 1000}[rng.IntN(5)],
			Pages: maskText(pages)}
		questions = append(questions, q)
	}
	var answers []struct{ Loads int }
	startStoreCode(t, "sglang==0.5.12").ask(questions, &answers)
	revoked := 0
	for i, q := range questions {
		c := hicache.SGLang{PageSize: q.Page, PrefetchThreshold: q.Threshold}
		present, known := hicache.NewBitmap(len(q.Pages)), hicache.NewBitmap(len(q.Pages))
		for j, bit := range q.Pages {
			known.Set(j)
			if bit == '1' {
				present.Set(j)
			}
		}
		load, _ := hicache.NewMap(len(q.Pages), present, known).Load(0, c.Rule())
		if int(load) != answers[i].Loads {
			t.Errorf("question %d: a rank is credited with %d pages, SGLang loads %d\n%+v", i, load, answers[i].Loads,
				q)
		}
		if len(q.Pages) > 0 && q.Pages[0] == '1' && load == 0 {
			revoked++
		}
	}
	if revoked < 20 {
		t.Errorf("only %d are too short to be loaded", revoked)
	}
}

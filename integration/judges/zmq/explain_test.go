//go:build judges

package zmq

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// TestExplain queries the location of every block of a prompt, as a user would, with the rule that stopped every
// worker: a hole, a tier, another prompt, a partly stored page, a threshold, a worker without a store. NATS, HTTP and
// the table must be equal.
func TestExplain(t *testing.T) {
	folder := t.TempDir()
	store := hicache.SGLang{Backend: "file", PageSize: harness.BlockSize, TPSize: 2, PPSize: 1, ModelName: "org/m",
		Directory: folder, PrefetchThreshold: 4 * harness.BlockSize}
	much := store
	much.PrefetchThreshold = 10 * harness.BlockSize
	x := harness.StartIndexer(t, t.TempDir(), "", "--l3-folder", folder)
	prompt := harness.Tokens(500, 20*harness.BlockSize)
	engine := map[string]*pyenv.Publisher{}
	for name, c := range map[string]*hicache.SGLang{"hole": &store, "tiers": &store, "choosy": &much, "other": nil} {
		engine[name] = pyenv.StartPublisher(t, pyenv.PublisherOptions{BlockSize: harness.BlockSize})
		var args []string
		if c != nil {
			args = []string{"--l3-config", harness.WriteWorkerStore(t, hicache.Config{SGLang: c})}
		}
		startShim(t, x, engine[name], name, args...)
	}
	_, hashes := engine["hole"].Store(prompt[:6*harness.BlockSize], nil)
	engine["hole"].Remove(hashes[3])
	_, hashes = engine["tiers"].Store(prompt[:2*harness.BlockSize], nil)
	engine["tiers"].Publish(pyenv.Event{Op: "store", Tokens: prompt[2*harness.BlockSize : 5*harness.BlockSize],
		Parent: &hashes[1], Hashes: []uint64{7, 8, 9}, Medium: "CPU"})
	engine["choosy"].Store(prompt[:5*harness.BlockSize], nil)
	engine["other"].Store(harness.Tokens(90000, harness.BlockSize), nil)
	x.WaitDepth(t, "m", harness.Tokens(90000, harness.BlockSize), "other", 1)
	harness.PutPages(t, &store, prompt, 0, 20)
	keys := store.FileKeys(store.PageHashes(nil, prompt, hicache.Space{}))
	if err := os.Remove(filepath.Join(folder, keys.Keys[12*keys.PerPage+1]+".bin")); err != nil {
		t.Fatal(err)
	}

	// The explanation of every worker as a line of text. "other" holds no block of the prompt.
	told := func(a *api.Answer) string {
		var lines []string
		for _, o := range a.Workers {
			if o.Path == nil {
				return "a worker is not explained"
			}
			held := ""
			for _, r := range o.Path.Held {
				held += fmt.Sprintf(" [%d,%d)%s", r.From, r.To, strings.Join(r.Tiers, "+"))
			}
			lines = append(lines, fmt.Sprintf("%s:%s own %d %s behind %d loads %d %s behind %d", o.Instance, held,
				o.Total(), o.Path.Stop, o.Path.Behind, o.L3, o.L3Stop, o.Path.L3Behind))
		}
		return strings.Join(lines, "\n")
	}
	const want = `choosy: [0,5)device own 5 not_held behind 0 loads 0 below_threshold behind 14
hole: [0,3)device [4,6)device own 3 not_held behind 2 loads 9 not_in_store behind 7
tiers: [0,2)device [2,5)host own 5 not_held behind 0 loads 7 not_in_store behind 7
other: own 0 not_held behind 0 loads 0 no_store behind 0`
	var a api.Answer
	catchingUp := func(o api.Overlap) bool { return o.CatchingUp }
	for deadline := time.Now().Add(harness.Patience); told(&a) != want || len(a.L3.Broken) != 1 ||
		slices.ContainsFunc(a.Workers, catchingUp); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("told\n%s\nwant\n%s\n%+v", told(&a), want, a.L3)
		}
		var failure *api.Error
		if a, failure = x.Query(t, "--model", "m", "--tokens", harness.CommaList(prompt),
			"--explain"); failure != nil && failure.Code != api.CodeUnknownModel {
			t.Fatal(failure)
		}
	}
	if a.L3.Broken[0] != (api.BrokenBlock{Block: 12, Objects: 1, Of: 2}) ||
		fmt.Sprint(a.L3.Ranges) != "[[0 12] [13 20]]" {
		t.Errorf("the store: %+v", a.L3)
	}

	var web api.Answer
	status, text, err := harness.Request(x.HTTP, "POST", "/v1/find", `{"model":"m","explain":true,"tokens":`+
		harness.JSONList(prompt)+`}`)
	if err := json.Unmarshal([]byte(text), &web); err != nil {
		t.Fatal(err)
	}
	// The ages grow, and the log may have further messages without an effect on the answer.
	a.Partitions, web.Partitions = nil, nil
	if a.L3.AgeMS, web.L3.AgeMS = 0, 0; err != nil || status != 200 || !reflect.DeepEqual(a, web) {
		t.Errorf("over HTTP: %d %v\n%+v\n%+v", status, err, web, a)
	}

	r := harness.Run(t, "indexer", "query", "--nats", x.NATS, "--model", "m", "--tokens", harness.CommaList(prompt),
		"--explain")
	got := strings.Join(strings.Fields(r.Stdout), " ")
	for _, want := range []string{
		"BLOCKS DEVICE HOST DISK EXTERNAL STORE",
		"[0,2) choosy/0 hole/0 tiers/0 - - - yes", "[2,3) choosy/0 hole/0 tiers/0 - - yes",
		"[3,4) choosy/0 tiers/0 - - yes",
		"[4,5) choosy/0 hole/0 tiers/0 - - yes", "[5,6) hole/0 - - - yes", "[6,12) - - - - yes", "[12,13) - - - - no",
		"[13,20) - - - - yes",
		"hole/0 3 block 3: in no tier of the worker (2 later blocks are of no use) 9 block 12: the store has 1 of 2 " +
			"objects (7 in the store behind are not loaded)",
		"choosy/0 5 block 5: in no tier of the worker 0 block 5 and the following run are less than the engine's least " +
			"load (14 in the store behind are not loaded)",
		"other/0 0 block 0: in no tier of the worker 0 the worker has registered no shared store",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, r.Stdout)
		}
	}
	if a, failure := x.Query(t, "--model", "m", "--hashes", "1,2", "--explain"); failure != nil ||
		len(a.Workers) != 4 || a.Workers[0].Path == nil || a.Workers[0].Path.Stop != "unknown_block" {
		t.Errorf("hashes without a holder: %+v, %v", a, failure)
	}
	if a, failure := x.Query(t, "--model", "m", "--tokens", harness.CommaList(prompt)); failure != nil ||
		a.Workers[0].Path != nil {
		t.Errorf("without explain: %+v, %v", a, failure)
	}
}

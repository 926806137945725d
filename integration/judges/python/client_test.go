//go:build judges

package python

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

const source = "../../../clients/python"

// python runs the client's Python in a folder, with more in the environment, and without any network of pip's.
func python(t *testing.T, dir string, env []string, args ...string) string {
	t.Helper()
	return pythonWith(t, "python-client.txt", dir, env, args...)
}

// pythonWith is python with the packages of another requirements file.
func pythonWith(t *testing.T, requirements, dir string, env []string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*harness.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, pyenv.PythonWith(t, requirements), args...)
	cmd.Dir = dir
	cmd.Env = append(harness.Environment(nil), append(env, "PYTHONDONTWRITEBYTECODE=1", "PIP_NO_INDEX=1",
		"PIP_CONFIG_FILE=/dev/null", "PIP_DISABLE_PIP_VERSION_CHECK=1")...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("python %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// install builds a wheel from the source distribution, as users get the package, and returns a folder with the
// installation.
func install(t *testing.T) string {
	t.Helper()
	built, installed := t.TempDir(), t.TempDir()
	python(t, source, nil, "-m", "build", "--no-isolation", "--outdir", built)
	wheels, err := filepath.Glob(filepath.Join(built, "kvatlas-*-py3-none-any.whl"))
	if err != nil || len(wheels) != 1 {
		t.Fatal(wheels, err)
	}
	python(t, built, nil, "-m", "pip", "install", "--no-deps", "--no-compile", "--target", installed, wheels[0])
	return installed
}

// TestPythonPackage builds the source distribution and the wheel without a network. Both have all modules. The types,
// including those of the tests, pass the strict check, and the unit tests pass.
func TestPythonPackage(t *testing.T) {
	installed := install(t)
	modules := func(dir string) (list []string) {
		for _, pattern := range []string{"*.py", "py.typed"} {
			found, err := filepath.Glob(filepath.Join(dir, "kvatlas", pattern))
			if err != nil {
				t.Fatal(err)
			}
			for _, path := range found {
				list = append(list, filepath.Base(path))
			}
		}
		return list
	}
	want, have := modules(filepath.Join(source, "src")), modules(installed)
	if len(want) < 8 || !slices.Equal(want, have) {
		t.Errorf("the wheel has %q of %q", have, want)
	}
	python(t, source, nil, "-m", "mypy", "--cache-dir", t.TempDir(), "src", "tests")
	python(t, source, []string{"PYTHONPATH=" + installed}, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider")
}

// hashCase is a prompt with hashes that Python computes too. Numbers are text, as in JavaScript.
type hashCase struct {
	Tokens    []uint32     `json:"tokens"`
	BlockSize uint32       `json:"block_size"`
	LoRA      string       `json:"lora_name"`
	Salt      string       `json:"cache_salt"`
	Lookahead uint32       `json:"lookahead"`
	Media     [][][]string `json:"media"` // of each block the items: hash and place
	Hashes    []string     `json:"hashes"`
	Sequence  []string     `json:"sequence_hashes"`
}

func hashCases(t *testing.T) (cases []hashCase) {
	rng := mathrand.New(mathrand.NewPCG(1337, 0))
	for i := range 200 {
		c := hashCase{BlockSize: []uint32{1, 2, 16, 64, 100}[rng.IntN(5)]}
		for range rng.IntN(500) {
			c.Tokens = append(c.Tokens, rng.Uint32()>>rng.IntN(32))
		}
		if i%2 == 1 {
			c.LoRA = []string{"", "adapter", "Ä-1"}[rng.IntN(3)]
			c.Salt = []string{"", "tenant", "日本"}[rng.IntN(3)]
			c.Lookahead = rng.Uint32N(3)
		}
		h, err := events.NewLookaheadHasher(c.BlockSize, c.Lookahead, events.Space{LoRA: c.LoRA, Salt: c.Salt})
		if err != nil {
			t.Fatal(err)
		}
		var media [][]events.BlockMedia
		for range rng.IntN(4) * (i % 3) {
			var items []events.BlockMedia
			var said [][]string
			for range rng.IntN(3) {
				item := events.BlockMedia{Hash: rng.Uint64(), Offset: rng.Int64N(32) - 16}
				if rng.IntN(4) == 0 {
					item.Offset = events.NoOffset
				}
				items = append(items, item)
				said = append(said, []string{fmt.Sprint(item.Hash), fmt.Sprint(item.Offset)})
			}
			media, c.Media = append(media, items), append(c.Media, said)
		}
		hashes := h.HashMedia(nil, c.Tokens, media)
		c.Hashes, c.Sequence = texts(hashes), texts(events.SeqHashes(nil, hashes))
		cases = append(cases, c)
	}
	return cases
}

// nameCase is a prompt for which Python computes the engine's block names.
type nameCase struct {
	Tokens    []uint32 `json:"tokens"`
	Size      int      `json:"size"`
	Algorithm string   `json:"algorithm"` // vLLM's; "": SGLang
	Seed      string   `json:"seed"`
	Eagle     bool     `json:"eagle"`
	Names     []string `json:"names"`
}

// nameCases returns cases from pkg/hicache, which integration/judges/engines compares with the engines' own code.
func nameCases(t *testing.T) (cases []nameCase) {
	rng := mathrand.New(mathrand.NewPCG(1338, 0))
	for i := range 100 {
		c := nameCase{Size: []int{1, 3, 16, 64}[rng.IntN(4)]}
		for range rng.IntN(300) {
			c.Tokens = append(c.Tokens, rng.Uint32()>>(1+rng.IntN(31)))
		}
		var pages []hicache.PageHash
		if i%2 == 0 {
			c.Eagle = rng.IntN(2) == 0
			pages = (&hicache.SGLang{PageSize: c.Size, IsEagle: c.Eagle}).PageHashes(nil, c.Tokens, hicache.Space{})
			for _, p := range pages {
				c.Names = append(c.Names, fmt.Sprint(int64(binary.BigEndian.Uint64(p[:8]))))
			}
		} else {
			c.Algorithm = []string{"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"}[rng.IntN(4)]
			c.Seed = fmt.Sprint(rng.IntN(100))
			v := hicache.VLLM{HashAlgo: c.Algorithm, HashSeed: &c.Seed, HashBlockSize: c.Size, EngineVersion: "0.33.0"}
			var err error
			if pages, err = v.Digests(nil, c.Tokens, "", ""); err != nil {
				t.Fatal(err)
			}
			size := 32
			if strings.HasPrefix(c.Algorithm, "xxhash") {
				size = 16
			}
			for _, p := range pages {
				c.Names = append(c.Names, fmt.Sprint(binary.BigEndian.Uint64(p[size-8:size])))
			}
		}
		cases = append(cases, c)
	}
	return cases
}

func texts[T ~uint64](list []T) []string {
	out := make([]string, 0, len(list))
	for _, v := range list {
		out = append(out, fmt.Sprint(uint64(v)))
	}
	return out
}

// fields are the names in JSON of a struct's fields.
func fields(of reflect.Type) (names []string) {
	for f := range of.Fields() {
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); f.Anonymous && f.Type.Kind() == reflect.Pointer {
			names = append(names, fields(f.Type.Elem())...)
		} else if f.Anonymous {
			names = append(names, fields(f.Type)...)
		} else if name != "-" && name != "" {
			names = append(names, name)
		}
	}
	return names
}

// codes returns the codes of docs/errors.md, which a test of pkg/api compares with the code.
func codes(t *testing.T) (list []string) {
	text, err := os.ReadFile("../../../docs/errors.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| [0-9]{3} \\|").FindAllStringSubmatch(string(text), -1) {
		list = append(list, m[1])
	}
	return list
}

// certify writes a self-signed certificate for 127.0.0.1 with its key.
func certify(t *testing.T, cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA:        true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	write(t, cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	write(t, key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}))
}

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// node describes an indexer for the tests.
type node = map[string]any

const held, blocks = 6, 10 // blocks of the prompt on w1, and all blocks of the prompt

var prompt = harness.Tokens(1, blocks*harness.BlockSize)

// hold has worker w1 hold a part of the prompt.
func hold(t *testing.T, x *harness.Indexer) {
	t.Helper()
	engine := harness.StartSimEngine(t)
	harness.StartSimShim(t, engine, x.NATS, "w1", "--serving-endpoint", "http://w1:8000")
	harness.ServePrompt(t, engine, prompt[:held*harness.BlockSize])
	x.WaitDepth(t, "m", prompt, "w1", held)
}

// alone starts an indexer with events of w1 and the workers w2 to w4. A text with the word warm has the tokens of the
// prompt.
func alone(t *testing.T) node {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tokens := []uint32{1}
		if body, _ := io.ReadAll(r.Body); strings.Contains(string(body), "warm") {
			tokens = prompt
		}
		w.Header().Set("Content-Type", api.JSON)
		_ = json.NewEncoder(w).Encode(map[string]any{"tokens": tokens, "count": len(tokens)})
	}))
	t.Cleanup(engine.Close)
	tokenizers := filepath.Join(t.TempDir(), "tokenizers.yaml")
	write(t, tokenizers, []byte("models: {m: {tokenize: \""+engine.URL+"\", timeout_ms: 240000}}\n"))
	x := harness.StartIndexer(t, t.TempDir(), "", "--tokenizers", tokenizers)
	hold(t, x)
	for i := 2; i <= 4; i++ {
		body := fmt.Sprintf(`{"instance":"w%d","model":"m","block_size":%d,"events":"none"}`, i, harness.BlockSize)
		if status, text, err := harness.Request(x.HTTP, "POST", "/v1/workers", body); err != nil || status != 200 {
			t.Fatal(status, text, err)
		}
	}
	return node{"http": "http://" + x.HTTP, "nats": "nats://" + x.NATS}
}

// pair starts two nodes. Tests may kill the first.
func pair(t *testing.T) node {
	nats := harness.StartNATS(t)
	var nodes []*harness.Indexer
	for i := range 2 {
		x := &harness.Indexer{NATS: nats, Process: harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id",
			fmt.Sprint("n", i), "--partitions", "4", "--http-listen", "127.0.0.1:0")}
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		nodes = append(nodes, x)
	}
	for _, x := range nodes {
		x.WaitFor(`msg=ready`)
	}
	hold(t, nodes[0])
	for _, x := range nodes {
		var seen string
		harness.Eventually(t, "both nodes have all workers", func() (bool, string) {
			_, seen, _ = harness.Request(x.HTTP, "POST", "/v1/find", `{"model":"m","tokens":`+harness.JSONList(prompt)+`}`)
			return strings.Contains(seen, fmt.Sprintf(`"device":%d`, held)), seen
		})
	}
	return node{"http": []string{"http://" + nodes[0].HTTP, "http://" + nodes[1].HTTP},
		"nats": "nats://" + nats, "pid": nodes[0].Cmd.Process.Pid}
}

// secured starts an indexer with TLS and a token.
func secured(t *testing.T) node {
	dir := t.TempDir()
	cert, key, token := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"), filepath.Join(dir, "token")
	certify(t, cert, key)
	const secret = "0123456789abcdef0123"
	write(t, token, []byte(secret))
	x := harness.StartIndexer(t, t.TempDir(), "", "--http-token-file", token, "--http-cert", cert, "--http-key", key)
	return node{"http": "https://" + x.HTTP, "token": secret, "ca": cert}
}

// describe starts indexers and writes the descriptions for the tests to a file.
func describe(t *testing.T) (live string) {
	world := alone(t)
	for name, v := range map[string]any{
		"prompt": prompt, "block_size": harness.BlockSize, "depth": held,
		"cluster": pair(t), "secured": secured(t), "nobody": "http://" + loopback.Reserve(t),
		"codes": codes(t), "hashes": hashCases(t), "names": nameCases(t),
		"fields": map[string][]string{
			"Query": fields(reflect.TypeFor[api.Query]()), "Answer": fields(reflect.TypeFor[api.Answer]()),
			"Overlap": fields(reflect.TypeFor[api.Overlap]()), "Path": fields(reflect.TypeFor[api.Path]()),
			"L3": fields(reflect.TypeFor[api.L3]()), "Prompt": fields(reflect.TypeFor[api.Prompt]()),
			"PartitionStatus": fields(reflect.TypeFor[api.PartitionStatus]()),
			"SelectRequest":   fields(reflect.TypeFor[api.SelectRequest]()),
			"Selection":       fields(reflect.TypeFor[api.Selection]()),
			"SessionBinding":  fields(reflect.TypeFor[api.SessionBinding]()),
			"SessionList":     fields(reflect.TypeFor[api.SessionList]()),
			"Session":         fields(reflect.TypeFor[api.Session]()),
			"SessionHolding":  fields(reflect.TypeFor[api.SessionHolding]()),
			"WorkerLoad":      fields(reflect.TypeFor[api.WorkerLoad]()),
			"BookRequest":     fields(reflect.TypeFor[api.BookRequest]()),
			"Booking":         fields(reflect.TypeFor[api.Booking]()),
			"ModelLoads":      fields(reflect.TypeFor[api.ModelLoads]()),
			"RankLoad":        fields(reflect.TypeFor[api.RankLoad]()),
			"PotentialList":   fields(reflect.TypeFor[api.PotentialList]()),
			"PotentialLoad":   fields(reflect.TypeFor[api.PotentialLoad]()),
			"WorkerList":      fields(reflect.TypeFor[api.WorkerList]()),
			"WorkerInfo":      fields(reflect.TypeFor[api.WorkerInfo]()),
			"WorkerRecord":    fields(reflect.TypeFor[api.WorkerRecord]()),
			"Lease":           fields(reflect.TypeFor[api.Lease]()),
			"Status":          append(fields(reflect.TypeFor[api.Status]()), "raw"),
			"PartitionDetail": fields(reflect.TypeFor[api.PartitionDetail]()),
			"IndexStatus":     fields(reflect.TypeFor[api.IndexStatus]()),
			"ClusterStatus":   fields(reflect.TypeFor[api.ClusterStatus]()),
			"NodeStatus":      fields(reflect.TypeFor[api.NodeStatus]()),
		},
	} {
		world[name] = v
	}
	text, err := json.Marshal(world)
	if err != nil {
		t.Fatal(err)
	}
	live = filepath.Join(t.TempDir(), "live.json")
	write(t, live, text)
	return live
}

// TestPythonClient runs the client's tests against running indexers.
func TestPythonClient(t *testing.T) {
	installed, live := install(t), describe(t)
	said := python(t, source, []string{"PYTHONPATH=" + installed, "KVATLAS_LIVE=" + live}, "-W", "error", "-m", "pytest",
		"-rP", "-p", "no:cacheprovider", "tests/live")
	t.Log(said)
}

// TestPythonAdapters runs the adapters in Ray Serve's and LiteLLM's own packages.
func TestPythonAdapters(t *testing.T) {
	env := []string{"PYTHONPATH=" + install(t), "KVATLAS_LIVE=" + describe(t), "RAY_USAGE_STATS_ENABLED=0",
		"LITELLM_LOCAL_MODEL_COST_MAP=True"}
	pythonWith(t, "python-adapters.txt", source, env, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/adapters")
}

// TestShownExamples runs the examples of docs/client.md under "In short", in Go, in Python and with curl's URL and
// body, against an indexer with such a worker.
func TestShownExamples(t *testing.T) {
	text, err := os.ReadFile("../../../docs/client.md")
	if err != nil {
		t.Fatal(err)
	}
	_, part, _ := strings.Cut(string(text), "\n## In short\n")
	part, _, _ = strings.Cut(part, "\n## ")
	goCode := regexp.MustCompile("(?s)\n```go\n(.*?)```").FindStringSubmatch(part)
	pyCode := regexp.MustCompile("(?s)\n```python\n(.*?)```").FindStringSubmatch(part)
	curl := regexp.MustCompile(`\n    curl -H '(.*): (.*)' -d '(.*)' (http://[^/]+)(/\S+)\n`).FindStringSubmatch(part)
	if goCode == nil || pyCode == nil || curl == nil {
		t.Fatalf("the page shows\n%s", part)
	}
	x := harness.StartIndexer(t, t.TempDir(), "")
	hasher, err := events.NewHasher(1, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	harness.PublishAs(t, t.Context(), harness.OpenNamespace(t, t.Context(), x.NATS), "worker-1", &events.Batch{
		Incarnation: 1, FirstID: 1, Model: "llama", BlockSize: 1, Events: []events.Event{{
			Kind: events.Stored, Tier: events.Device, Locals: hasher.Hash(nil, []uint32{1, 2, 3}),
			Blocks: []events.BlockHash{1, 2, 3},
		}},
	})
	x.WaitDepth(t, "llama", []uint32{1, 2, 3}, "worker-1", 3)
	here := strings.NewReplacer("http://127.0.0.1:8090", "http://"+x.HTTP)
	const want = "worker-1 0 3 0\n"

	var answer api.Answer
	if err := harness.HTTPDo(x.HTTP, "POST", curl[5], json.RawMessage(curl[3]), &answer); err != nil ||
		here.Replace(curl[4]) != "http://"+x.HTTP || curl[1]+curl[2] != "Content-Type"+api.JSON ||
		fmt.Sprintln(answer.Workers[0].Instance, answer.Workers[0].Rank, answer.Workers[0].Device,
			answer.Workers[0].Host) != want {
		t.Errorf("curl: %+v, %v", answer, err)
	}

	dir := t.TempDir()
	main := filepath.Join(dir, "main.go")
	write(t, main, []byte(`package main

import (
	"context"
	"fmt"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 4*60e9)
	defer cancel()
	`+strings.NewReplacer("answer, err := c.Find", "if err != nil {\npanic(err)\n}\nanswer, err := c.Find",
		"for _, w", "if err != nil {\npanic(err)\n}\nfor _, w").Replace(here.Replace(goCode[1]))+`}
`))
	harness.Eventually(t, "Go is answered", func() (bool, string) {
		out, err := exec.CommandContext(t.Context(), "go", "run", main).CombinedOutput()
		return err == nil && string(out) == want, string(out)
	})
	env := []string{"PYTHONPATH=" + install(t)}
	harness.Eventually(t, "Python is answered", func() (bool, string) {
		out := python(t, dir, env, "-c", "try:\n  exec("+fmt.Sprintf("%q", here.Replace(pyCode[1]))+
			")\nexcept Exception as e: print(repr(e))")
		return out == want, out
	})
}

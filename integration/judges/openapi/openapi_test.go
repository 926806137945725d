//go:build judges

package openapi

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// object is a JSON object.
type object = map[string]any

const (
	held, blocks = 6, 10 // blocks of the prompt on w1, and all blocks of the prompt
	token        = "0123456789abcdef0123"

	// settings allows statuses that are not errors of the indexer: missing workers and expired deadlines. It counts 413
	// as a rejection too: of a list with too many elements.
	settings = "hooks = \"openapi_hooks\"\n[checks.not_a_server_error]\n" +
		"expected-statuses = [\"2xx\", \"3xx\", \"4xx\", 503, 504]\n" +
		"[checks.negative_data_rejection]\n" +
		"expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429, \"5xx\"]\n"
)

var prompt = harness.Tokens(1, blocks*harness.BlockSize)

// start starts an indexer with two workers. w1 holds a part of the prompt.
func start(t *testing.T, args ...string) *harness.Indexer {
	x := harness.StartIndexer(t, t.TempDir(), "", args...)
	engine := harness.StartSimEngine(t)
	harness.StartSimShim(t, engine, x.NATS, "w1", "--serving-endpoint", "http://w1:8000")
	harness.ServePrompt(t, engine, prompt[:held*harness.BlockSize])
	return x
}

// request sends a request with a token.
func request(t *testing.T, x *harness.Indexer, method, path string, body io.Reader) []byte {
	t.Helper()
	r, err := http.NewRequest(method, "http://"+x.HTTP+path, body)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+token)
	r.Header.Set("Content-Type", "application/json")
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		t.Fatal(answer.Status, string(text), err)
	}
	return text
}

// strict returns the document for only this version: answers have no unknown fields. With secured, the token is
// required.
func strict(t *testing.T, text []byte, secured bool) object {
	t.Helper()
	var document object
	if err := json.Unmarshal(text, &document); err != nil {
		t.Fatal(err)
	}
	for _, schema := range document["components"].(object)["schemas"].(object) {
		if schema, is := schema.(object); is && schema["additionalProperties"] == nil {
			schema["additionalProperties"] = false
		}
	}
	document["security"] = []any{}
	if secured {
		document["security"] = []any{object{"token": []any{}}}
	}
	return document
}

// judge makes schemathesis send requests: the phase coverage has the limits of every field, and fuzzing has the given
// number of random requests for every operation. It returns the total number of requests.
func judge(t *testing.T, x *harness.Indexer, phases, examples string, secured bool, more ...string) int {
	t.Helper()
	python, dir := pyenv.PythonWith(t, "openapi.txt"), t.TempDir()
	document, err := json.Marshal(strict(t, request(t, x, "GET", "/v1/openapi.json", nil), secured))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{"openapi.json": document, "schemathesis.toml": []byte(settings)} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*harness.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, python, append([]string{"-m", "schemathesis.cli", "--config-file",
		"schemathesis.toml", "run", "openapi.json", "--url", "http://" + x.HTTP, "--phases", phases,
		"--generation-deterministic", "--no-shrink", "--suppress-health-check", "all", "--request-timeout",
		strconv.Itoa(int(harness.Patience.Seconds())), "--continue-on-failure", "--no-color", "--workers", "1",
		"--max-examples", examples, "--checks", "all", "--exclude-checks", "positive_data_acceptance"}, more...)...)
	cmd.Dir = dir
	cmd.Env = append(harness.Environment(nil), "PYTHONDONTWRITEBYTECODE=1", "KVATLAS_PROMPT="+harness.JSONList(prompt),
		"KVATLAS_BLOCK_SIZE="+strconv.Itoa(harness.BlockSize),
		"PYTHONPATH="+filepath.Dir(pyenv.Script(t, "openapi_hooks.py")))
	said, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("schemathesis: %v\n%s", err, said)
	}
	t.Logf("%s\n%s", said, regexp.MustCompile(`"requests":\[.*?\]`).Find(request(t, x, "GET", "/v1/status", nil)))
	generated := regexp.MustCompile(`(?m)^  ([0-9]+) generated`).FindSubmatch(said)
	if generated == nil {
		t.Fatalf("output of schemathesis:\n%s", said)
	}
	n, err := strconv.Atoi(string(generated[1]))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestOpenAPIHolds checks 2,000 replies against the document. No status is 500, all statuses, content types, headers
// and fields are in the document, and all forbidden requests are refused.
func TestOpenAPIHolds(t *testing.T) {
	t.Parallel()
	x := start(t)
	x.WaitDepth(t, "m", prompt, "w1", held)
	if n := judge(t, x, "coverage,fuzzing", "30", false); n < 2000 {
		t.Errorf("only %d requests were made", n)
	}
}

// TestOpenAPIHoldsWithToken checks the document with a token.
func TestOpenAPIHoldsWithToken(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	judge(t, start(t, "--http-token-file", file), "fuzzing", "10", true, "-H", "Authorization: Bearer "+token)
}

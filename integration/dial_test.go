package integration

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// innerService is a service that no worker registration may reach. It counts connections, and its replies contain a
// secret word.
type innerService struct {
	port int
	mu   sync.Mutex
	seen []string // the first line of every connection
}

func (s *innerService) asked() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string{}, s.seen...)
}

const innerSecret = "SECRET-OF-AN-INNER-SERVICE"

// startInner starts a service with a fixed reply.
func startInner(t *testing.T, answer string) *innerService {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	s := &innerService{port: l.Addr().(*net.TCPAddr).Port}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				head := make([]byte, 4096)
				n, _ := c.Read(head)
				line, _, _ := strings.Cut(string(head[:n]), "\n")
				s.mu.Lock()
				s.seen = append(s.seen, line)
				s.mu.Unlock()
				fmt.Fprint(c, answer)
			}()
		}
	}()
	return s
}

// vllmStore returns a store with the master at an address.
func vllmStore(address string, port int) *hicache.Config {
	seed := "0"
	return &hicache.Config{VLLM: &hicache.VLLM{ModelName: "m", TPSize: 1, PPSize: 1, NumKVHead: 8,
		Groups:        []hicache.Group{{Kind: hicache.Full, BlockSize: harness.BlockSize}},
		HashBlockSize: harness.BlockSize, SchedulerBlockSize: harness.BlockSize, HashAlgo: "sha256_cbor", HashSeed: &seed,
		EngineVersion: "0.32.0", Master: hicache.Master{Address: address, MetricsPort: port}}}
}

// folderStore is a store in a folder.
func folderStore(folder string) *hicache.Config {
	return &hicache.Config{SGLang: &hicache.SGLang{Backend: "file", PageSize: harness.BlockSize, TPSize: 1, PPSize: 1,
		ModelName: "m", Directory: folder}}
}

// TestBadAddressesAreRefused registers forbidden addresses over every interface. They are refused with the reason, and
// an existing folder is refused with the same error as a missing folder.
func TestBadAddressesAreRefused(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "", "--conductor-listen", "127.0.0.1:0", "--select-listen", "127.0.0.1:0")
	conductor := x.WaitFor(`Mooncake's conductor is served" listen=(\S+)`)[1]
	selecting := x.WaitFor(`the selection service is served" listen=(\S+)`)[1]
	post := func(addr, path, body string) (int, string) {
		t.Helper()
		status, text, err := harness.Request(addr, "POST", path, body)
		if err != nil {
			t.Fatal(err)
		}
		return status, text
	}
	l3 := func(c *hicache.Config) string {
		text, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	endpoints := map[string]string{"ipc:///var/run/docker.sock": "only tcp://HOST:PORT", "tcp://169.254.169.254:80": "",
		"tcp://[::ffff:169.254.169.254]:80": "", "tcp://[fd00:ec2::254]:80": "", "tcp://8.8.8.8:53": "",
		"tcp://0.0.0.0:80": "", "tcp://[fe80::1%eth0]:80": "zone", "tcp://a/b?c:80": "host name", "tcp://u@a:80": "",
		"tcp://a:0": "port", "tcp://*:80": "host name", "unix:///x": "transport"}
	for endpoint, reason := range endpoints {
		if reason == "" {
			reason = "dial"
		}
		if strings.Contains(endpoint, "@") {
			reason = "host name"
		}
		for what, try := range map[string]func() (int, string){
			"register": func() (int, string) {
				return post(x.HTTP, "/register", fmt.Sprintf(
					`{"instance_id":"w","endpoint":%q,"model_name":"m","block_size":16}`, endpoint))
			},
			"register replay": func() (int, string) {
				return post(x.HTTP, "/register", fmt.Sprintf(
					`{"instance_id":"w","endpoint":"tcp://127.0.0.1:1","replay_endpoint":%q,"model_name":"m","block_size":16}`,
					endpoint))
			},
			"worker": func() (int, string) {
				return post(x.HTTP, "/v1/workers", fmt.Sprintf(
					`{"instance":"w","events_endpoint":%q,"model":"m","block_size":16}`, endpoint))
			},
			"worker's replay": func() (int, string) {
				return post(x.HTTP, "/v1/workers", fmt.Sprintf(
					`{"instance":"w","events_endpoint":"tcp://127.0.0.1:1","replay_endpoint":%q,"model":"m","block_size":16}`,
					endpoint))
			},
			"conductor": func() (int, string) {
				return post(conductor, "/register", registration("w", endpoint, "", ""))
			},
		} {
			if status, text := try(); status/100 != 4 || !strings.Contains(text, reason) {
				t.Errorf("%s at %s: %d %s; want a refusal for %q", what, endpoint, status, text, reason)
			}
		}
		body := fmt.Sprintf(`{"worker_id":7,"model_name":"m","endpoint":"http://a:1","block_size":16,"kv_events_endpoint":%q}`,
			endpoint)
		if status, text := post(selecting, "/workers", body); status/100 != 4 &&
			!strings.Contains(text, "reconciliation failed") {
			t.Errorf("the selection service accepts %s: %d %s", endpoint, status, text)
		}
	}
	for store, reason := range map[*hicache.Config]string{
		vllmStore("127.0.0.1/latest/meta-data?x", 0): "HOST:PORT", vllmStore("169.254.169.254", 80): "dial",
		vllmStore("[::ffff:169.254.169.254]:50051", 80): "dial", vllmStore("8.8.8.8:1", 1): "dial",
		vllmStore("fe80::1%eth0", 1): "zone", vllmStore("u:p@a:1", 1): "host name", vllmStore("a\r\nb", 1): "host name",
		folderStore("/etc"): "--l3-folder", folderStore("/nonexistent"): "--l3-folder",
		folderStore("/etc/passwd"): "--l3-folder",
	} {
		body := fmt.Sprintf(`{"instance_id":"w","endpoint":"tcp://127.0.0.1:1","model_name":"m","block_size":16,"l3":%s}`,
			l3(store))
		status, text := post(x.HTTP, "/register", body)
		if status != http.StatusBadRequest || !strings.Contains(text, reason) {
			t.Errorf("l3 %s: %d %s; want a refusal for %q", store, status, text, reason)
		}
	}
	_, there := post(x.HTTP, "/register", fmt.Sprintf(
		`{"instance_id":"w","endpoint":"tcp://127.0.0.1:1","model_name":"m","block_size":16,"l3":%s}`, l3(folderStore("/etc"))))
	_, not := post(x.HTTP, "/register", fmt.Sprintf(
		`{"instance_id":"w","endpoint":"tcp://127.0.0.1:1","model_name":"m","block_size":16,"l3":%s}`,
		l3(folderStore("/nonexistent"))))
	if there != not {
		t.Errorf("an existing folder is refused by %s, a missing folder by %s", there, not)
	}
	for _, serving := range []string{"http://169.254.169.254", "http://a/latest?x", "http://u:p@a", "file:///etc/passwd",
		"ipc:///x", "169.254.169.254:80"} {
		body := fmt.Sprintf(`{"instance":"w","endpoint":%q,"model":"m","block_size":16,"events":"none"}`, serving)
		if status, text := post(x.HTTP, "/v1/workers", body); status != http.StatusBadRequest ||
			!strings.Contains(text, "endpoint: ") {
			t.Errorf("serving address %s: %d %s", serving, status, text)
		}
	}
	if _, text, err := harness.Request(x.HTTP, "GET", "/workers", ""); err != nil || text != "[]" {
		t.Errorf("a refused registration remains: %s, %v", text, err)
	}
}

// TestAddressesOutsideDialAllow registers names of loopback with a node that may connect only to another network. No
// connection is made, and refusals are counted and reported. Unchecked records of a lease are skipped.
func TestAddressesOutsideDialAllow(t *testing.T) {
	t.Parallel()
	inner := startInner(t, "HTTP/1.1 401 no\r\nContent-Length: 26\r\n\r\n"+innerSecret)
	tokenizers := filepath.Join(t.TempDir(), "tokenizers.yaml")
	if err := os.WriteFile(tokenizers, []byte("default: {engines: tokenize, timeout_ms: 60000}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	x := harness.StartIndexer(t, t.TempDir(), "", "--dial-allow", "10.0.0.0/8", "--tokenizers", tokenizers)
	post := func(path, body string) string {
		t.Helper()
		_, text, err := harness.Request(x.HTTP, "POST", path, body)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	if text := post("/register", fmt.Sprintf(
		`{"instance_id":"w0","endpoint":"tcp://127.0.0.1:%d","model_name":"m0","block_size":16}`, inner.port)); !strings.Contains(
		text, "--dial-allow") {
		t.Errorf("an address outside is accepted: %s", text)
	}
	// A name is checked at the time of the connection.
	store, err := json.Marshal(vllmStore("localhost", inner.port))
	if err != nil {
		t.Fatal(err)
	}
	if text := post("/register", fmt.Sprintf(`{"instance_id":"w1","endpoint":"tcp://localhost:%d","replay_endpoint":`+
		`"tcp://localhost:%d","model_name":"m1","block_size":16,"l3":%s}`, inner.port, inner.port, store)); text !=
		`{"status":"ok"}` {
		t.Fatal(text)
	}
	post("/v1/workers", fmt.Sprintf(
		`{"instance":"w2","model":"m2","block_size":16,"endpoint":"http://localhost:%d","events":"none"}`, inner.port))
	tokens := harness.JSONList(harness.Tokens(1, 4*harness.BlockSize))
	harness.Eventually(t, "the store gets no request", func() (bool, string) {
		a := post("/v1/find", `{"model":"m1","tokens":`+tokens+`}`)
		return strings.Contains(a, `"status":"unavailable"`) && strings.Contains(a, "not within --dial-allow"), a
	})
	if a := post("/v1/find", `{"model":"m2","prompt":"hello"}`); !strings.Contains(a, "unavailable: ") ||
		!strings.Contains(a, "not within --dial-allow") {
		t.Errorf("the engine gets a request for tokens: %s", a)
	}

	// A lease from another program may have any address.
	ctx := t.Context()
	ns := harness.OpenNamespace(t, ctx, x.NATS)
	for i, r := range []registry.Record{
		{L3: vllmStore("127.0.0.1", inner.port)}, {L3: folderStore("/etc")},
		{L3: vllmStore("127.0.0.1/path?x", inner.port)},
		{Worker: &api.WorkerSpec{Endpoint: fmt.Sprintf("http://127.0.0.1:%d/admin?x=", inner.port)}},
		{Worker: &api.WorkerSpec{Endpoint: "http://169.254.169.254/v1"}},
	} {
		r.Version, r.Instance = 1, events.WorkerID(fmt.Sprint("hostile-", i))
		r.Model, r.BlockSize = fmt.Sprint("h", i), harness.BlockSize
		r.Source, r.LeaseMS, r.State = "vllm", 600_000, registry.Held
		harness.PublishAs(t, ctx, ns, r.Instance, &events.Batch{Incarnation: 1, FirstID: 1, Model: r.Model,
			BlockSize: r.BlockSize, Events: []events.Event{{Kind: events.Stored, Tier: events.Device,
				Locals: []events.LocalHash{1}, Blocks: []events.BlockHash{1}}}})
		key, err := ns.WorkerKey(r.Key())
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ns.OpenWorkers().Put(ctx, key, text); err != nil {
			t.Fatal(err)
		}
	}
	var status api.Status
	harness.Eventually(t, "skipped records are counted and reported", func() (bool, string) {
		_, text, err := harness.Request(x.HTTP, "GET", "/v1/status", "")
		if err == nil {
			err = json.Unmarshal([]byte(text), &status)
		}
		problems := strings.Join(status.Problems, "\n")
		return err == nil && status.Engines.Skipped == 5 && status.DialsDenied > 0 &&
			strings.Contains(problems, "registrations of 5 ranks is not used") &&
			strings.Contains(problems, "outside --dial-allow were refused"), text
	})
	for i, want := range []string{"not within --dial-allow", "--l3-folder", "HOST:PORT"} {
		harness.Eventually(t, "the answer has the reason: "+want, func() (bool, string) {
			a := post("/v1/find", fmt.Sprintf(`{"model":"h%d","tokens":%s}`, i, tokens))
			return strings.Contains(a, want) && strings.Contains(a, `"status":"mismatch"`), a
		})
	}
	for i := 3; i < 5; i++ {
		harness.Eventually(t, "no engine gets a request", func() (bool, string) {
			a := post("/v1/find", fmt.Sprintf(`{"model":"h%d","prompt":"hello"}`, i))
			return strings.Contains(a, "no_source: ") && strings.Contains(a, "not_tokenized"), a
		})
	}
	_, metrics, err := harness.Request(x.HTTP, "GET", "/metrics", "")
	if err != nil || !strings.Contains(metrics, "kvatlas_registrations_skipped 5") ||
		!strings.Contains(metrics, "kvatlas_dials_denied_total ") {
		t.Errorf("metrics: %v\n%s", err, metrics)
	}
	if seen := inner.asked(); len(seen) > 0 {
		t.Errorf("the node has connected: %q", seen)
	}
}

// TestNothingOfAnAnswerIsRepeated connects a node to services on loopback that are neither engines nor masters. No text
// of their replies is in a reply of the node or in the log.
func TestNothingOfAnAnswerIsRepeated(t *testing.T) {
	t.Parallel()
	tokenizers := filepath.Join(t.TempDir(), "tokenizers.yaml")
	if err := os.WriteFile(tokenizers, []byte("default: {engines: tokenize, timeout_ms: 60000}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	x := harness.StartIndexer(t, t.TempDir(), "", "--tokenizers", tokenizers)
	tokens := harness.JSONList(harness.Tokens(1, 4*harness.BlockSize))
	http11 := func(status, head, body string) string {
		return fmt.Sprintf("HTTP/1.1 %s\r\n%sConnection: close\r\nContent-Length: %d\r\n\r\n%s", status, head, len(body),
			body)
	}
	for i, answer := range []string{
		http11("401 "+innerSecret, "", innerSecret), http11("200 OK", "", innerSecret),
		http11("503 no", "", `{"error_code":-1011,"error_message":"`+innerSecret+`"}`),
		http11("200 OK", "", `{"role":"`+innerSecret+`","service_ready":false,"ha_state":"`+innerSecret+`"}`),
		http11("200 OK", "", `{"success":false,"error":"`+innerSecret+`"}`),
		http11("302 Found", "Location: http://["+innerSecret+"\r\n", ""), innerSecret + "\r\n", "HTTP/1.1 " + innerSecret + "\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: " + innerSecret + "\r\n\r\n", "SSH-2.0-" + innerSecret + "\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: " + innerSecret + "\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + innerSecret + "\r\n",
	} {
		inner := startInner(t, answer)
		store, err := json.Marshal(vllmStore("127.0.0.1", inner.port))
		if err != nil {
			t.Fatal(err)
		}
		var seen strings.Builder
		ask := func(method, path, body string) string {
			t.Helper()
			_, text, err := harness.Request(x.HTTP, method, path, body)
			if err != nil {
				t.Fatal(err)
			}
			seen.WriteString(text)
			return text
		}
		ask("POST", "/register", fmt.Sprintf(`{"instance_id":"w%d","endpoint":"tcp://127.0.0.1:%d","replay_endpoint":`+
			`"tcp://127.0.0.1:%d","model_name":"m%d","block_size":16,"l3":%s}`, i, inner.port, inner.port, i, store))
		ask("POST", "/v1/workers", fmt.Sprintf(
			`{"instance":"t%d","model":"t%d","block_size":16,"endpoint":"http://127.0.0.1:%d","events":"none"}`, i, i, inner.port))
		ask("POST", "/v1/find", fmt.Sprintf(`{"model":"t%d","prompt":"hello"}`, i))
		harness.Eventually(t, "the services got all kinds of requests", func() (bool, string) {
			a := ask("POST", "/v1/find", fmt.Sprintf(`{"model":"m%d","tokens":%s}`, i, tokens))
			lines := strings.Join(inner.asked(), "\n")
			return strings.Contains(lines, "GET /health") && strings.Contains(lines, "POST /tokenize") &&
				strings.Contains(lines, "\xff") && strings.Contains(a, `"reason":"mooncake`), a + lines
		})
		ask("GET", "/v1/status", "")
		ask("GET", "/v1/workers", "")
		ask("GET", "/workers", "")
		ask("GET", "/metrics", "")
		for _, text := range []string{seen.String(), x.Said()} {
			if at := strings.Index(text, "SECRET"); at >= 0 {
				t.Errorf("%q is repeated: ...%s", answer, text[max(0, at-300):min(len(text), at+60)])
				break
			}
		}
	}
}

//go:build judges

package mooncake

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// TestLeaderInEtcd runs an indexer with two real masters and a real etcd, which has the leader. After the death of the
// leader, the store is unavailable until the second master leads, with the second master's content. The indexer never
// connects to an address outside --dial-allow, regardless of the address's source.
func TestLeaderInEtcd(t *testing.T) {
	t.Parallel()
	etcd := pyenv.StartEtcd(t, http.DefaultClient, "", "")
	masters := pyenv.StartMooncakes(t, etcd, 2)
	_, port, err := net.SplitHostPort(masters[0].HTTP)
	if err != nil {
		t.Fatal(err)
	}
	endpoint := strings.TrimPrefix(etcd.URL, "http://")
	config := func(address string) string {
		return fmt.Sprintf(`{"sglang_hicache_mooncake":{"backend":"mooncake","page_size":%d,"tp_size":1,"pp_size":1,
			"is_mla_model":false,"key_prefix":"org-m","prefetch_threshold":1,"master_server_address":%q,
			"master_metrics_port":%s}}`, harness.BlockSize, address, port)
	}
	c, _, err := hicache.ParseConfig([]byte(config("etcd://" + endpoint)))
	if err != nil {
		t.Fatal(err)
	}
	prompt := harness.Tokens(800, 10*harness.BlockSize)
	p, err := c.Prompt(prompt, "", "", harness.BlockSize)
	if err != nil {
		t.Fatal(err)
	}
	names := p.Lanes[0].Names

	x := harness.StartIndexer(t, t.TempDir(), "")
	engine := harness.StartSimEngine(t)
	register := func(to, l3 string) (int, string) {
		t.Helper()
		status, text, err := harness.Request(to, "POST", "/register", fmt.Sprintf(
			`{"instance_id":"web","endpoint":%q,"model_name":"m","block_size":%d,"l3":%s}`, engine.Endpoint(),
			harness.BlockSize, l3))
		if err != nil {
			t.Fatal(err)
		}
		return status, text
	}
	if status, text := register(x.HTTP, config("k8s://ns/lease")); status != 400 || !strings.Contains(text, "not in k8s") {
		t.Errorf("an election in Kubernetes: %d %s", status, text)
	}
	if status, text := register(x.HTTP, config("etcd://"+endpoint)); status != 201 {
		t.Fatalf("register: %d %s", status, text)
	}
	until := func(what string, good func(*api.Answer) bool) {
		t.Helper()
		var a api.Answer
		var failure *api.Error
		for deadline := time.Now().Add(2 * harness.Patience); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
			a, failure = x.Query(t, "--model", "m", "--tokens", harness.CommaList(prompt))
			if failure == nil && good(&a) {
				return
			}
		}
		t.Fatalf("%s; the last answer: %+v, %v", what, a, failure)
	}
	loads := func(n uint32) func(*api.Answer) bool {
		return func(a *api.Answer) bool { return a.L3.Status == api.L3OK && a.L3.FromStart == n }
	}
	masters[0].StartClient()
	masters[0].Put(names(0, 7).Keys...)
	until("the first leader's pages", loads(7))

	leader := leads(t, masters)
	masters[leader].KillMaster()
	until("no master leads", func(a *api.Answer) bool { return a.L3.Status == api.L3Unavailable })
	masters[0].KillClient()
	until("another leads, and has nothing", loads(0))
	if now := leads(t, masters); now == leader {
		t.Fatalf("master %d is dead and leads", now)
	}
	masters[0].StartClient()
	masters[0].Put(names(0, 4).Keys...)
	until("the second leader's pages", loads(4))

	status, text, err := harness.Request(x.HTTP, "GET", "/v1/status", "")
	if err != nil || status != 200 {
		t.Fatal(status, err)
	}
	var s api.Status
	if err := json.Unmarshal([]byte(text), &s); err != nil || len(s.L3) != 1 || s.L3[0].Election == nil {
		t.Fatalf("%v: %s", err, text)
	}
	if e := s.L3[0].Election; e.Changes != 2 || e.Failures == 0 || e.Leader != masters[1-leader].HTTP || e.Error != "" {
		t.Errorf("the election: %+v", e)
	}

	// The rules allow the address of etcd, but not the leader's address.
	bound := harness.StartIndexer(t, t.TempDir(), "", "--dial-allow", "127.0.0.1/32")
	if status, text := register(bound.HTTP, config("etcd://127.0.0.9:2379")); status != 400 ||
		!strings.Contains(text, "master_server_address") {
		t.Errorf("a forbidden etcd: %d %s", status, text)
	}
	if status, text := register(bound.HTTP, config("etcd://"+endpoint)); status != 201 {
		t.Fatalf("register: %d %s", status, text)
	}
	x = bound
	until("the leader is not allowed", func(a *api.Answer) bool {
		return a.L3.Status == api.L3Unavailable && strings.Contains(a.L3.Reason, "allow")
	})
}

// leads returns the serving master.
func leads(t *testing.T, masters []*pyenv.Mooncake) int {
	t.Helper()
	for i, m := range masters {
		res, err := http.Get("http://" + m.HTTP + "/health")
		if err != nil {
			continue
		}
		var said struct {
			Ready bool `json:"service_ready"`
		}
		err = json.NewDecoder(res.Body).Decode(&said)
		res.Body.Close()
		if err == nil && said.Ready {
			return i
		}
	}
	t.Fatal("no master serves")
	return 0
}

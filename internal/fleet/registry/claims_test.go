package registry

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/logtest"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// refusals sends the reasons of refused claims.
type refusals struct {
	leaseTaken
	reasons chan<- error
}

func (r refusals) Unclaimed(_ string, err error) { r.reasons <- err }

// claiming is a registry that receives single entries of the bucket.
type claiming struct {
	*testing.T
	*Registry
	revision  uint64
	unclaimed []string // logged leases
	changes   int      // calls of ClaimsChanged
}

func newClaiming(t *testing.T) *claiming {
	c := &claiming{T: t}
	c.Registry = New(Config{Namespace: &jetstream.Namespace{}, ClaimsChanged: func() { c.changes++ },
		Log: logtest.New(func(l logtest.Line) {
			if strings.HasPrefix(l.Text, "a worker's lease is ignored") {
				c.unclaimed = append(c.unclaimed, fmt.Sprint(l.Attrs["worker"], " ", l.Attrs["model"]))
			}
		})})
	c.observe(jetstream.Watched{Anew: true})
	c.observe(jetstream.Watched{Current: true})
	return c
}

func (c *claiming) entry(key string, value []byte) jetstream.Entry {
	c.revision++
	return jetstream.Entry{Key: key, Value: value, Revision: c.revision, Written: time.Now(), Deleted: value == nil}
}

// lease returns an entry of rank 0 of a worker; without a model, the entry is deleted.
func (c *claiming) lease(name, model string) jetstream.Entry {
	r := record(name, DefaultLease)
	r.Model, r.Worker = model, &api.WorkerSpec{Endpoint: "http://" + name}
	l3, _, err := hicache.ParseConfig([]byte(`{"vllm_mooncake_store":{"model_name":"m","tp_size":1,"pp_size":1,` +
		`"num_kv_heads":8,"groups":[{"kind":"full","block_size":16}],"hash_block_size":16,"scheduler_block_size":16,` +
		`"engine_version":"0.32.0","hash_seed":"0","master_server_address":"master:1","master_metrics_port":2}}`))
	if err != nil {
		c.Fatal(err)
	}
	r.L3, r.Source = &l3, "vllm"
	key := must(jetstream.WorkerKey(0, r.Key()))
	if model == "" {
		return c.entry(key, nil)
	}
	return c.entry(key, must(r.encode()))
}

func (c *claiming) claim(name, model string, there bool) jetstream.Entry {
	key := must(jetstream.ClaimKey(events.WorkerID(name), model))
	if !there {
		return c.entry(key, nil)
	}
	return c.entry(key, []byte(`{"version":1}`))
}

func (c *claiming) see(entries ...jetstream.Entry) {
	c.observe(jetstream.Watched{Entries: entries})
}

// serves checks that a worker is registered for a model, or for none (""), in every view of the registry.
func (c *claiming) serves(name, model string) {
	c.Helper()
	key := events.RankKey{Instance: events.WorkerID(name)}
	got := ""
	if w, there := c.Worker(key); there {
		got = w.Record.Model
	}
	if got != model {
		c.Fatalf("%s is registered for %q, want %q", name, got, model)
	}
	for _, m := range []string{"m", "other"} {
		want := m == model
		pool := c.Pool(m).Rank(key)
		_, byEndpoint := c.Pool(m).At([]string{"http://" + name})
		if _, shares := c.Sharing(m).Rule(key); (pool != nil) != want || (len(byEndpoint) == 0) != want || shares != want {
			c.Errorf("%s in the pool of %s: %+v, endpoint unknown: %q, shares a store: %v; want %v", name, m, pool,
				byEndpoint, shares, want)
		}
	}
	if source := c.Source(key); (source != "") != (model != "") {
		c.Errorf("source of %s: %q", name, source)
	}
	if _, registered := c.Registered(key.Instance); registered != (model != "") {
		c.Errorf("%s is registered: %v", name, registered)
	}
}

// TestALeaseCountsWithAClaim steps a registry through leases with and without a claim.
func TestALeaseCountsWithAClaim(t *testing.T) {
	c := newClaiming(t)
	c.see(c.lease("w", "m"))
	c.serves("w", "m") // an old shim, on NATS without accounts
	c.RequireClaims(true)
	c.serves("w", "")
	c.see(c.claim("w", "other", true))
	c.serves("w", "")
	c.see(c.claim("v", "m", true)) // a claim of another worker
	c.serves("w", "")
	c.see(c.claim("w", "m", true))
	c.serves("w", "m")
	c.RequireClaims(false)
	c.serves("w", "m")
	c.RequireClaims(true)
	c.serves("w", "m")

	c.see(c.claim("w", "other", false), c.lease("w", "other")) // a lease of another model replaces the lease
	c.serves("w", "")
	c.see(c.lease("w", "m"))
	c.serves("w", "m")
	c.see(c.lease("w", "other"))
	c.see(c.lease("w", "")) // the lease is gone
	c.see(c.claim("w", "other", true))
	c.serves("w", "")

	c.see(c.lease("w", "m"))
	c.see(c.claim("w", "m", false))
	c.serves("w", "")
	renewed := c.lease("w", "m")
	for range 3 { // renewals change nothing, and are not reported
		renewed.Revision++
		c.revision++
		c.see(renewed)
	}
	c.serves("w", "")
	c.see(c.claim("w", "m", true))
	c.serves("w", "m")

	c.see(c.lease("x", "m"), c.claim("x", "m", true)) // the claim comes after the lease
	c.serves("x", "m")
	c.see(c.claim("y", "m", true), c.lease("y", "m"))
	c.serves("y", "m")
	if want := []string{"w/0 m", "x/0 m"}; !slices.Equal(c.unclaimed, want) { // once for each worker
		t.Errorf("reports: %q, want %q", c.unclaimed, want)
	}
	if c.Claimed("w", "other") != true || c.Claimed("w", "third") || c.Claimed("nobody", "m") {
		t.Error("the claims differ from the written claims")
	}
}

// TestALostClaim restarts the watch without a claim, and in a recreated bucket.
func TestALostClaim(t *testing.T) {
	c := newClaiming(t)
	c.RequireClaims(true)
	claim, lease := c.claim("w", "m", true), c.lease("w", "m")
	c.see(claim, lease)
	c.serves("w", "m")
	c.observe(jetstream.Watched{Anew: true})
	c.observe(jetstream.Watched{Entries: []jetstream.Entry{lease}})
	c.serves("w", "m") // until the watch is complete
	c.observe(jetstream.Watched{Current: true})
	c.serves("w", "")
	c.see(claim)
	c.serves("w", "m")

	both := []jetstream.Entry{claim, lease}
	c.observe(jetstream.Watched{Anew: true, Epoch: time.Unix(1, 0), Entries: both, Current: true})
	c.observe(jetstream.Watched{Anew: true, Epoch: time.Unix(2, 0)})
	c.observe(jetstream.Watched{Current: true})
	if got := c.lost[claim.Key]; string(got) != string(claim.Value) {
		t.Errorf("the claim is written into the new bucket as %q", got)
	}
	c.observe(jetstream.Watched{Anew: true, Epoch: time.Unix(3, 0)}) // the bucket is gone again before the writes
	c.observe(jetstream.Watched{Current: true})
	for _, e := range both {
		if got := c.lost[e.Key]; string(got) != string(e.Value) {
			t.Errorf("%s is written into the second new bucket as %q", e.Key, got)
		}
	}
	c.see(c.lease("w", "m")) // the shim is faster than the refill
	c.serves("w", "m")
}

// TestClaimsAreBounded: a worker cannot fill the bucket with claims.
func TestClaimsAreBounded(t *testing.T) {
	c := newClaiming(t)
	c.cfg.Namespace = must(jetstream.JoinNamespace(t.Context(), newSite(t).conn, jetstream.NamespaceConfig{Name: "n"}))
	c.RequireClaims(true)
	for i := range maxClaims + 3 {
		c.see(c.claim("w", fmt.Sprint("m", i), true))
	}
	c.see(c.claim("w", "m0", true), c.claim("w", fmt.Sprint("m", maxClaims), true)) // again
	if !c.Claimed("w", fmt.Sprint("m", maxClaims-1)) || c.Claimed("w", fmt.Sprint("m", maxClaims)) {
		t.Error("later claims count in place of the first")
	}
	s := &api.Status{}
	c.MarkStatus(s)
	if s.Claims.Claims != maxClaims || s.Claims.Ignored != 3 || !s.Claims.Required {
		t.Errorf("status: %+v", s.Claims)
	}
	if due := c.dueClaims(0); len(due) != 3 {
		t.Errorf("claims to delete: %v", due)
	}
	// Without a lease all claims become due; with a lease none does.
	c.see(c.claim("leased", "m", true), c.lease("leased", "m"))
	c.dueClaims(0)
	if due := c.dueClaims(claimGrace - 1); len(due) != 3 {
		t.Errorf("due too early: %v", due)
	}
	if due := c.dueClaims(claimGrace); len(due) != 3+maxClaims {
		t.Errorf("%d claims are due", len(due))
	}
	c.see(c.claim("w", "m0", true)) // the shim will soon hold the lease
	if due := c.dueClaims(claimGrace); len(due) != 3 {
		t.Errorf("%d due claims, including a new claim", len(due))
	}
	c.see(c.claim("w", "m66", false), c.claim("w", "m1", false), c.claim("w", "m65", true)) // there is room now
	if !c.Claimed("w", "m65") || c.Claimed("w", "m1") {
		t.Error("a claim does not count after the end of another")
	}
	c.observe(jetstream.Watched{Err: errors.New("away")})
	if due := c.dueClaims(time.Hour); len(due) != 0 {
		t.Errorf("due while the bucket cannot be watched: %v", due)
	}
}

// TestClaimsOfHoldersStay: the claims of a worker without a lease stay while the index holds blocks of the worker, or
// the holdings are unknown, for any values.
func TestClaimsOfHoldersStay(t *testing.T) {
	s := newSite(t)
	bucket := must(s.ns.EnsureWorkers(t.Context(), jetstream.BucketConfig{}))
	c := newClaiming(t)
	holds, busy := false, error(nil)
	c.cfg.Namespace, c.cfg.Bucket = s.ns, bucket
	c.cfg.Holds = func(_ context.Context, w events.WorkerID) (bool, error) {
		return busy == nil && holds && w == "loaded", busy
	}
	for _, name := range []events.WorkerID{"loaded", "gone"} {
		key := must(jetstream.ClaimKey(name, "m"))
		revision := must(bucket.Put(t.Context(), key, []byte(`{"version":1,"kept":true}`)))
		c.see(jetstream.Entry{Key: key, Value: []byte(`{"version":1,"kept":true}`), Revision: revision})
	}
	for _, step := range []struct {
		what        string
		after       time.Duration
		busy, holds bool
		want        int
	}{
		{"seen", 0, false, true, 2}, {"not known", claimGrace, true, true, 2}, {"the grace is over", 0, false, true, 1},
		{"its blocks are gone", 1, false, false, 1}, {"and the grace is over", claimGrace, false, false, 0},
	} {
		c.start, holds, busy = c.start.Add(-step.after), step.holds, nil
		if step.busy {
			busy = errors.New("the partition is not restored")
		}
		c.sweepClaims(t.Context())
		left := 0
		for _, name := range []events.WorkerID{"loaded", "gone"} {
			key := must(jetstream.ClaimKey(name, "m"))
			if _, err := bucket.Latest(t.Context(), key); err == nil {
				left++
			} else if errors.Is(err, jetstream.ErrNotFound) {
				c.see(jetstream.Entry{Key: key, Deleted: true})
			} else {
				t.Fatal(err)
			}
		}
		if left != step.want {
			t.Errorf("%s: %d claims remain, want %d", step.what, left, step.want)
		}
	}
}

// TestRemovalLeavesNewClaims: the removal of a worker deletes the claims from before, and no claim that a new shim has
// written since.
func TestRemovalLeavesNewClaims(t *testing.T) {
	s := newSite(t)
	bucket := must(s.ns.EnsureWorkers(t.Context(), jetstream.BucketConfig{}))
	c := newClaiming(t)
	c.cfg.Namespace, c.cfg.Bucket = s.ns, bucket
	put := func(model string) {
		key, value := must(jetstream.ClaimKey("w", model)), []byte(`{"version":1}`)
		revision := must(bucket.Put(t.Context(), key, value))
		c.see(jetstream.Entry{Key: key, Value: value, Revision: revision})
	}
	put("before")
	put("rewritten")
	claims := c.presentClaims("w")
	put("rewritten")
	put("new")
	if err := c.deleteClaims(t.Context(), claims); err != nil {
		t.Fatal(err)
	}
	for model, want := range map[string]bool{"before": false, "rewritten": true, "new": true} {
		if _, err := bucket.Latest(t.Context(), must(jetstream.ClaimKey("w", model))); (err == nil) != want {
			t.Errorf("the claim of model %s: %v", model, err)
		}
	}
}

// TestClaimsAtRandom compares with the naive rule: a lease counts if claims are not required, or the worker has claimed
// the model.
func TestClaimsAtRandom(t *testing.T) {
	for seed := range uint64(testkit.Rounds(30)) {
		rng := rand.New(rand.NewPCG(seed, 34))
		c := newClaiming(t)
		required := false
		leases, claims := map[string]string{}, map[claimKey]bool{}
		keys := map[string]jetstream.Entry{}
		for range 300 {
			name, model := fmt.Sprint("w", rng.IntN(4)), []string{"m", "other"}[rng.IntN(2)]
			var e jetstream.Entry
			switch rng.IntN(8) {
			case 0:
				required = !required
				c.RequireClaims(required)
			case 1:
				delete(leases, name)
				e = c.lease(name, "")
			case 2, 3:
				leases[name] = model
				e = c.lease(name, model)
			case 4:
				delete(claims, claimKey{events.WorkerID(name), model})
				e = c.claim(name, model, false)
			case 5, 6:
				claims[claimKey{events.WorkerID(name), model}] = true
				e = c.claim(name, model, true)
			case 7: // the watch restarts, in any order
				c.observe(jetstream.Watched{Anew: true})
				for _, e := range keys {
					c.see(e)
				}
				c.observe(jetstream.Watched{Current: true})
			}
			if e.Key != "" {
				keys[e.Key] = e
				c.see(e)
			}
			for i := range 4 {
				name := fmt.Sprint("w", i)
				model := leases[name]
				if required && !claims[claimKey{events.WorkerID(name), model}] {
					model = ""
				}
				c.serves(name, model)
			}
		}
		if len(c.unclaimed) == 0 || c.changes == 0 {
			t.Fatalf("seed %d: %d leases without a claim, %d changes", seed, len(c.unclaimed), c.changes)
		}
	}
}

// claimsConfig has the users of a NATS server with required claims: a node, a shim of w1 for model m, and a shim of w2
// with permissions from before claims.
const claimsConfig = `accounts { A { jetstream: enabled, users: [
	{ user: node, password: x, permissions: { publish: { allow: ["$JS.API.>", "$KV.>", "kv.v1.n.>", "_INBOX.>",
		"$SYS.REQ.USER.INFO", "kv.v1.n.claims.required"] }, subscribe: { allow: [">"] } } }
	{ user: shim, password: x, permissions: { publish: { allow: ["$JS.API.INFO",
		"$JS.API.STREAM.MSG.GET.KV_kvatlas_n", "$KV.kvatlas_n_workers.1.w1.*", "$KV.kvatlas_n_workers.serves.w1.m",
		"$JS.API.DIRECT.GET.KV_kvatlas_n_workers.$KV.kvatlas_n_workers.1.w1.*"] },
		subscribe: { allow: ["_INBOX.>"] } } }
	{ user: old, password: x, permissions: { publish: { allow: ["$JS.API.INFO",
		"$JS.API.STREAM.MSG.GET.KV_kvatlas_n", "$KV.kvatlas_n_workers.0.w2.*",
		"$JS.API.DIRECT.GET.KV_kvatlas_n_workers.$KV.kvatlas_n_workers.0.w2.*"] },
		subscribe: { allow: ["_INBOX.>"] } } }
] } }
`

// TestTheServerRefusesOthersModels runs shims with real permissions. The lease of a shim counts only for the user's
// model. The lease of a shim without the permission counts after a node has claimed the model. Other leases expire.
func TestTheServerRefusesOthersModels(t *testing.T) {
	config := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(config, []byte(claimsConfig), 0o600); err != nil {
		t.Fatal(err)
	}
	s := newSiteOn(t, natsserver.Options{ConfigFile: config}, jetstream.ConnOptions{User: "node", Password: "x"})
	s.until("claims are required", func() bool { return s.nodes[0].ClaimsRequired() && s.nodes[1].ClaimsRequired() })
	shim := func(user, name, model string, lease time.Duration) (refused <-chan error, end func()) {
		t.Helper()
		conn := must(jetstream.Connect(s.ctx, jetstream.ConnOptions{Server: s.server, Wait: true, User: user,
			Password: "x"}))
		t.Cleanup(conn.Close)
		ns := must(jetstream.OpenNamespace(s.ctx, conn, "n"))
		r := record(name, lease)
		r.Model, r.Source = model, "vllm"
		unclaimed, taken := make(chan error, 100), make(chan struct{})
		l := must(NewLease(ns, r, refusals{leaseTaken{taken: func() { close(taken) }}, unclaimed}))
		running, cancel := context.WithCancel(s.ctx)
		done := make(chan error, 1)
		go func() { done <- l.Keep(running, func() {}) }()
		<-taken
		end = sync.OnceFunc(func() {
			cancel()
			s.must(<-done)
		})
		t.Cleanup(end)
		return unclaimed, end
	}
	refused, end := shim("shim", "w1", "m", time.Hour)
	s.until("w1 is registered for its model", func() bool { return s.know("w1") })
	if len(refused) > 0 {
		t.Error(<-refused)
	}
	end()
	refused, end = shim("shim", "w1", "llama", MinLease)
	if err := <-refused; !errors.Is(err, jetstream.ErrDenied) {
		t.Errorf("the claim of another model: %v", err)
	}
	s.until("w1 is not registered for another model", func() bool { return s.know() })
	s.until("each node counts it", func() bool {
		for _, r := range s.nodes {
			status := &api.Status{}
			r.MarkStatus(status)
			if c := status.Claims; c.Leases != 1 || len(c.Unclaimed) != 1 || c.Unclaimed[0].Model != "llama" ||
				len(status.Problems) != 1 || !strings.Contains(status.Problems[0], `w1/0 (model "llama")`) {
				return false
			}
		}
		return true
	})
	end()
	s.until("a lease that does not count expires, and is cleared", func() bool { return s.wasCleared("w1") })
	key := must(jetstream.WorkerKey(must(s.ns.PartitionOf("w1")), events.RankKey{Instance: "w1"}))
	s.until("it is deleted", func() bool {
		_, err := s.bucket.Latest(s.ctx, key)
		return errors.Is(err, jetstream.ErrNotFound)
	})

	// The equivalent of a shim of an earlier release: no claim.
	refused, _ = shim("old", "w2", "m", time.Hour)
	if err := <-refused; !errors.Is(err, jetstream.ErrDenied) {
		t.Errorf("a claim without the permission: %v", err)
	}
	s.until("w2's lease is counted", func() bool {
		status := &api.Status{}
		s.nodes[0].MarkStatus(status)
		return status.Claims.Leases == 1 && s.know()
	})
	s.must(Claim(s.ctx, s.ns, "w2", "m"))
	s.until("w2 is registered after the claim of its model", func() bool { return s.know("w2") })
	s.must(Unclaim(s.ctx, s.ns, "w2"))
	s.until("w2 is not registered without its claim", func() bool { return s.know() })
}

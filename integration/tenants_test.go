package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// asTeam sends a request with a tenant's headers over HTTP. It returns the status and the header Retry-After.
func asTeam(ctx context.Context, addr, path, team, key string, body, into any) (status int, retry string, err error) {
	text, err := json.Marshal(body)
	if err != nil {
		return 0, "", err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+path, bytes.NewReader(text))
	if err != nil {
		return 0, "", err
	}
	r.Header.Set("Content-Type", "application/json")
	if team != "" {
		r.Header.Set("X-Team", team)
	}
	if key != "" {
		r.Header.Set("X-Api-Key", key)
	}
	reply, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer reply.Body.Close()
	text, err = io.ReadAll(reply.Body)
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	return reply.StatusCode, reply.Header.Get("Retry-After"), err
}

// funnelOf are the sums of a funnel that a list of tenants has too: requests, routed and reported requests, requested,
// reused and expected tokens. All requests of the tests have a worker, so that the rest is computed.
func funnelOf(f *api.Funnel) [7]uint64 {
	expected := uint64(0)
	for _, l := range f.Steps[4].Lost {
		if l.Cause == api.CauseNotReported {
			expected = l.Tokens
		}
	}
	asked, reused := f.Steps[0].Tokens, f.Steps[4].Tokens
	return [7]uint64{f.Requests, f.Routed, f.Reported, asked, reused, expected, asked - reused - expected}
}

func sumsOf(u *api.TenantUse) [7]uint64 {
	return [7]uint64{u.Requests, u.Routed, u.Reported, u.Requested, u.Reused, u.Expected, u.Computed + u.Unserved}
}

// TestTenants sends requests of ten teams at the same time to three nodes with eight engines. On each node, the sums
// over the tenants are the funnel's, and each team has its own tokens. The same holds while a node is away, and after
// its restart, which loses its counts in both.
func TestTenants(t *testing.T) {
	t.Parallel()
	const size, workers, teams = harness.BlockSize, 8, 10
	nats := harness.StartNATS(t)
	start := func(i int) *harness.Indexer {
		x := &harness.Indexer{NATS: nats, Process: harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id",
			fmt.Sprint("n", i), "--partitions", "4", "--http-listen", "127.0.0.1:0", "--tenants", "header=x-team",
			"--tenants", "api-key", "--metrics-tenants", "3")}
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		return x
	}
	nodes := []*harness.Indexer{start(0), start(1), start(2)}
	ctx := harness.Context(t)
	engines := map[events.WorkerID]*enginesim.Engine{}
	for i := range workers {
		name := fmt.Sprint("w", i)
		e := harness.StartSimEngine(t)
		engines[events.WorkerID(name)] = e
		harness.StartSimShim(t, e, nats, name)
	}
	asks := func(x *harness.Indexer) *client.Client {
		c := harness.Ask(t, x.HTTP)
		return c
	}
	serves := func(i int) {
		c := asks(nodes[i])
		harness.Eventually(t, fmt.Sprintf("node %d may choose all workers", i), func() (bool, string) {
			p, err := c.Select(ctx, &api.SelectRequest{Advisory: true, Query: api.Query{Model: "m",
				Tokens: harness.Tokens(1, size), Explain: true}})
			return err == nil && p.Candidates == workers, fmt.Sprintf("%+v %v", p, err)
		})
	}
	for i := range nodes {
		serves(i)
	}
	type sums struct{ requested, reused uint64 }
	truth := make([]map[string]sums, len(nodes)) // by node and team
	var mu sync.Mutex
	load := func(each int, to ...int) {
		var all sync.WaitGroup
		for team := range teams {
			all.Go(func() {
				r := rand.New(rand.NewPCG(uint64(team), uint64(each)))
				name := fmt.Sprint("team-", team)
				key, shown := "", "x-team:"+name
				switch team {
				case 0:
					name, shown = "", ""
				case 1:
					name, key, shown = "", "secret-of-team-1", "api-key"
				}
				for n := range each {
					i := to[r.IntN(len(to))]
					tokens := harness.Tokens(1000*r.IntN(5), size*(1+r.IntN(8))+r.IntN(size))
					id := fmt.Sprint(each, "-", team, "-", n, "-", len(to))
					var s api.Selection
					status, _, err := asTeam(ctx, nodes[i].HTTP, "/v1/select", name, key, map[string]any{"model": "m",
						"block_size": size, "tokens": tokens, "request_id": id}, &s)
					if err != nil || status != http.StatusOK {
						t.Errorf("select: %d, %v", status, err)
						return
					}
					hit, err := engines[s.Worker].Serve(tokens, nil)
					if err != nil {
						t.Error(err)
						return
					}
					reused := uint64(0)
					if n%3 > 0 {
						reused = min(uint64(hit*size), uint64(s.Device)*size)
						err = asks(nodes[i]).Report(ctx, &api.Report{RequestID: id, CachedTokens: reused})
						if err != nil {
							t.Error(err)
							return
						}
					}
					mu.Lock()
					if truth[i] == nil {
						truth[i] = map[string]sums{}
					}
					was := truth[i][shown]
					truth[i][shown] = sums{was.requested + uint64(len(tokens)), was.reused + reused}
					mu.Unlock()
				}
			})
		}
		all.Wait()
	}
	compare := func(when string, missing ...string) {
		t.Helper()
		want := map[string]sums{}
		for _, of := range truth {
			for team, s := range of {
				want[team] = sums{want[team].requested + s.requested, want[team].reused + s.reused}
			}
		}
		for i := range nodes {
			if fmt.Sprint(missing) == fmt.Sprint([]string{fmt.Sprint("n", i)}) {
				continue
			}
			c := asks(nodes[i])
			what := fmt.Sprintf("%s, node %d: the sums of tenants are the funnel's", when, i)
			harness.Eventually(t, what, func() (bool, string) {
				f, err := c.Funnel(ctx, &api.FunnelRequest{Model: "m", Since: "1h"})
				if err != nil {
					return false, err.Error()
				}
				list, err := c.Tenants(ctx, &api.TenantsRequest{Since: "1h"})
				// a killed node is missing until its lease ends
				named := func(list []string) bool { return len(list) == 0 || slices.Equal(list, missing) }
				if err != nil || !named(list.Missing) || !named(f.Missing) {
					return false, fmt.Sprintf("%+v, %+v, %v", list, f.Missing, err)
				}
				got, total := map[string]sums{"": {list.None.Requested, list.None.Reused}}, list.None.Requested
				for _, u := range list.Tenants {
					name, _, _ := strings.Cut(u.Tenant, ":#")
					got[name] = sums{u.Requested, u.Reused}
					total += u.Requested
					if u.Missed != 0 || u.HeldBlocks != nil || strings.Contains(u.Tenant, "secret") {
						return false, fmt.Sprintf("%+v", u)
					}
				}
				ok := sumsOf(&list.Total) == funnelOf(f) && fmt.Sprint(got) == fmt.Sprint(want) && list.Other.Requested == 0 &&
					list.Total.Requested == total && list.Total.Unserved == 0
				return ok, fmt.Sprintf("%v, want %v; %v, the funnel has %v", got, want, sumsOf(&list.Total), funnelOf(f))
			})
		}
	}
	load(30, 0, 1, 2)
	compare("under load")
	short, err := asks(nodes[0]).Tenants(ctx, &api.TenantsRequest{Since: "1h", Limit: 2})
	if err != nil || len(short.Tenants) != 2 || short.Folded != teams-3 || short.Other.Requested == 0 {
		t.Errorf("of two: %+v, %v", short, err)
	}
	if whole, err := asks(nodes[0]).Tenants(ctx, &api.TenantsRequest{Since: "1h"}); err != nil ||
		sumsOf(&whole.Total) != sumsOf(&short.Total) {
		t.Errorf("%+v, of two: %+v, %v", whole.Total, short.Total, err)
	}
	_, text, err := harness.Request(nodes[0].HTTP, http.MethodGet, "/metrics", "")
	n := strings.Count(text, "kvatlas_tenant_requests_total{")
	if err != nil || n != 4 || strings.Contains(text, "secret") {
		t.Errorf("%d series of tenants, %v", n, err)
	}
	if out := harness.Run(t, "indexer", "tenants", "--nats", nats, "--since", "1h"); out.Code != 0 ||
		!strings.Contains(out.Stdout, "x-team:team-9") || strings.Contains(out.Stdout, "secret") {
		t.Errorf("%+v", out)
	} else {
		t.Log(out.Stdout)
	}

	nodes[2].Kill()
	truth[2] = nil // with the counts of the funnel
	load(5, 0, 1)
	compare("without a node", "n2")
	nodes[2] = start(2)
	serves(2)
	load(7, 0, 1, 2)
	compare("after its restart")
}

// TestTenantQuota sends requests of teams with and without a quota to two nodes. A rejected request has the reason and
// the time of the next try, over HTTP and NATS, and the other node learns of the used tokens.
func TestTenantQuota(t *testing.T) {
	t.Parallel()
	const size = harness.BlockSize
	file := filepath.Join(t.TempDir(), "quotas.yaml")
	routing := filepath.Join(t.TempDir(), "routing.yaml")
	for path, text := range map[string]string{routing: "queue: {threshold_tokens: 1000000, classes: [{name: low}]}\n",
		file: "\"*\": {tokens_per_minute: 64}\nx-team:large: {tokens_per_minute: 1000000}\n" +
			"x-team:slow: {tokens_per_minute: 64, over: lower, class: low}\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	nats := harness.StartNATS(t)
	nodes := make([]*harness.Indexer, 2)
	for i := range nodes {
		x := &harness.Indexer{NATS: nats, Process: harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id",
			fmt.Sprint("n", i), "--partitions", "4", "--http-listen", "127.0.0.1:0", "--tenants", "header=x-team",
			"--tenant-quotas", file, "--routing-config", routing)}
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		nodes[i] = x
	}
	ctx := harness.Context(t)
	harness.StartSimShim(t, harness.StartSimEngine(t), nats, "w1")
	q := map[string]any{"model": "m", "block_size": size, "tokens": harness.Tokens(1, 4096)}
	for i, x := range nodes {
		harness.Eventually(t, fmt.Sprintf("node %d chooses", i), func() (bool, string) {
			var s api.Selection
			status, _, err := asTeam(ctx, x.HTTP, "/v1/select", "large", "", q, &s)
			return status == http.StatusOK && s.Quota == nil, fmt.Sprintf("%d %+v %v", status, s, err)
		})
	}
	var s api.Selection
	if status, _, err := asTeam(ctx, nodes[0].HTTP, "/v1/select", "small", "", q, &s); status != http.StatusOK {
		t.Fatalf("the first request of a team: %d, %v", status, err)
	}
	for i, x := range nodes {
		harness.Eventually(t, fmt.Sprintf("node %d rejects the team", i), func() (bool, string) {
			var body api.ErrorBody
			status, retry, err := asTeam(ctx, x.HTTP, "/v1/select", "small", "", q, &body)
			if status != http.StatusTooManyRequests || body.Error == nil || body.Error.Quota == nil {
				return false, fmt.Sprintf("%d %+v %v", status, body.Error, err)
			}
			of := body.Error.Quota
			return body.Error.Code == api.CodeQuota && of.Tenant == "x-team:small" && of.TokensPerMinute == 64 &&
					of.Action == "rejected" && of.RetryAfterMS > 0 && retry == fmt.Sprint((of.RetryAfterMS+999)/1000), fmt.Sprintf(
					"%s, %+v", retry, of)
		})
	}
	for _, action := range []string{"", "lowered"} {
		var s api.Selection
		status, _, err := asTeam(ctx, nodes[0].HTTP, "/v1/select", "slow", "", q, &s)
		got := ""
		if s.Quota != nil {
			got = s.Quota.Action
		}
		if err != nil || status != http.StatusOK || got != action {
			t.Errorf("a team with a lowering quota: %d, %+v, %v", status, s.Quota, err)
		}
	}
	for team, want := range map[string]int{"large": 200, "": 200, "small": 429} {
		var answer any
		if status, retry, err := asTeam(ctx, nodes[1].HTTP, "/v1/select", team, "", q, &answer); status != want ||
			(retry != "") != (want == 429) {
			t.Errorf("team %q: %d, retry after %q, %v", team, status, retry, err)
		}
	}
	c := harness.Ask(t, nodes[0].HTTP)
	harness.Eventually(t, "rejected requests are counted, and not in the funnel", func() (bool, string) {
		list, err := c.Tenants(ctx, &api.TenantsRequest{})
		if err != nil {
			return false, err.Error()
		}
		ok := 0
		for _, u := range list.Tenants {
			if u.Tenant == "x-team:small" && u.Rejected >= 3 && u.RejectedTokens == 4096*u.Rejected && u.Requests <= 2 ||
				u.Tenant == "x-team:slow" && u.Lowered == 1 && u.Requests == 2 {
				ok++
			}
		}
		return ok == 2, fmt.Sprintf("%+v", list)
	})
}

// TestTenantBlocks stores blocks with and without a salt, and requests some of the prompts. Each salt has the blocks of
// its prompts. Blocks of prompts without a request have no tenant.
func TestTenantBlocks(t *testing.T) {
	t.Parallel()
	const size = harness.BlockSize
	nats := harness.StartNATS(t)
	nodes := make([]*harness.Indexer, 2)
	for i := range nodes {
		x := &harness.Indexer{NATS: nats, Process: harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id",
			fmt.Sprint("n", i), "--partitions", "4",
			"--partition-replicas", "1", "--http-listen", "127.0.0.1:0", "--tenants", "salt")}
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		nodes[i] = x
	}
	ctx := harness.Context(t)
	ns := harness.OpenNamespace(t, ctx, nats)
	want := map[string]uint64{}
	for i, p := range []struct {
		worker events.WorkerID
		salt   string
		blocks int
		asked  bool
	}{{"w1", "a", 5, true}, {"w2", "a", 3, true}, {"w3", "b", 7, true}, {"w4", "", 4, true}, {"w5", "c", 6, false}} {
		hasher, err := events.NewHasher(size, events.Space{Salt: p.salt})
		if err != nil {
			t.Fatal(err)
		}
		locals := hasher.HashItems(nil, harness.Tokens(1, size*p.blocks), nil)
		e := events.Event{Kind: events.Stored, Tier: events.Device, Locals: locals}
		for j := range locals {
			e.Blocks = append(e.Blocks, events.BlockHash(1000*i+j+1))
		}
		harness.PublishAs(t, ctx, ns, p.worker, &events.Batch{Incarnation: 1, FirstID: 1, Model: "m", BlockSize: size,
			Events: []events.Event{e}})
		if p.asked {
			want["salt:"+p.salt] += uint64(p.blocks)
			q := map[string]any{"model": "m", "block_size": size, "tokens": harness.Tokens(1, size*p.blocks)}
			if p.salt != "" {
				q["cache_salt"] = p.salt
			}
			harness.Eventually(t, "a node finds the blocks", func() (bool, string) {
				var a api.Answer
				err := harness.HTTPDo(nodes[i%2].HTTP, "POST", "/v1/find", q, &a)
				return err == nil && len(a.Workers) > 0, fmt.Sprintf("%+v, %v", a, err)
			})
		}
	}
	for i, x := range nodes {
		harness.Eventually(t, fmt.Sprintf("node %d has the held blocks", i), func() (bool, string) {
			var list api.TenantList
			err := harness.HTTPDo(x.HTTP, "POST", "/v1/tenants", map[string]any{"model": "m", "held": true}, &list)
			if err != nil || list.UnattributedBlocks == nil || list.None.HeldBlocks == nil {
				return false, fmt.Sprintf("%+v, %v", list, err)
			}
			got := map[string]uint64{"salt:": *list.None.HeldBlocks}
			for _, u := range list.Tenants {
				if u.HeldBlocks == nil {
					return false, fmt.Sprintf("%+v", u)
				}
				got[u.Tenant] = *u.HeldBlocks
			}
			return fmt.Sprint(got) == fmt.Sprint(want) && *list.UnattributedBlocks == 6 && list.Absent == nil,
				fmt.Sprintf("%v and %d, want %v and 6: %+v", got, *list.UnattributedBlocks, want, list)
		})
	}
}

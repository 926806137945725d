package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// claimsServer writes the configuration of a NATS server with a single account: a node, a reader, and a shim for every
// worker with the permission to claim a model. If claims are required, the permissions of the node list the marker.
func claimsServer(t *testing.T, file, addr, data string, required bool, models map[string]string) {
	t.Helper()
	const ns, partitions = "default", jetstream.DefaultPartitions
	var b strings.Builder
	user := func(name string, publish ...string) {
		fmt.Fprintf(&b, "{ user: %s, password: x, permissions: { publish: { allow: [\"%s\"] }, subscribe: { allow: "+
			"[\">\"] }, allow_responses: true } }\n", name, strings.Join(publish, `", "`))
	}
	node := []string{"$JS.API.>", "$KV.>", "kv.v1.>", "_INBOX.>", "$SYS.REQ.USER.INFO"}
	if required {
		node = append(node, jetstream.Names(ns).ClaimsRequired())
	}
	user("node", node...)
	for name, model := range models {
		p, err := jetstream.PartitionOf(events.WorkerID(name), partitions)
		if err != nil {
			t.Fatal(err)
		}
		claim, err := jetstream.ClaimKey(events.WorkerID(name), model)
		if err != nil {
			t.Fatal(err)
		}
		at := fmt.Sprintf("%d.%s.*", p, name)
		bucket := "$KV.kvatlas_" + ns + "_workers."
		user(name, "$JS.API.INFO", "$JS.API.STREAM.MSG.GET.KV_kvatlas_"+ns, "$KV.kvatlas_"+ns+".model.*",
			"$JS.API.STREAM.INFO.>", "$JS.API.DIRECT.GET.>", "kv.v1."+ns+".ev."+at, "kv.v1."+ns+".ctl."+at,
			"kv.v1."+ns+".recall."+at, bucket+at, bucket+claim)
	}
	text := fmt.Sprintf("listen: %q\njetstream { store_dir: %q, max_file_store: 64GB }\n"+
		"accounts { A { jetstream: enabled, users: [\n%s] } }\n", addr, data, b.String())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestModelClaims runs shims with NATS users that may claim a single model, before and after NATS requires claims. A
// shim serves its model, a shim names the model of another shim, and a shim claims nothing, like shims before claims.
func TestModelClaims(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	addr, config := loopback.Reserve(t), filepath.Join(dir, "nats.conf")
	models := map[string]string{"good": "m", "evil": "own", "old": "none"}
	write := func(required bool) { claimsServer(t, config, addr, filepath.Join(dir, "data"), required, models) }
	write(false)
	server := harness.Start(t, "nats-server", "-c", config)
	server.WaitFor(`Server is ready`)
	as := func(user string) string { return "nats://" + user + ":x@" + addr }
	listen := loopback.Reserve(t)
	node := harness.Start(t, "indexer", "serve", "--nats", as("node"), "--http-listen", listen)
	node.WaitFor(`msg=ready`)
	x := &harness.Indexer{Process: node, NATS: as("node"), HTTP: "http://" + listen}

	prompt := harness.Tokens(1, 4*harness.BlockSize)
	start := func(name, model string, flags ...string) *harness.Process {
		t.Helper()
		e := harness.StartSimEngine(t)
		shim := harness.Start(t, "worker-shim", append([]string{"run", "--engine", e.Endpoint(), "--replay", e.Replay(),
			"--worker", name, "--model", model, "--block-size", "16", "--nats", as(name), "--serving-endpoint",
			"http://" + loopback.Reserve(t)}, flags...)...)
		shim.WaitFor(`msg=registered`)
		harness.ServePrompt(t, e, prompt)
		return shim
	}
	start("good", "m")
	evil, old := start("evil", "m"), start("old", "m")
	evil.WaitFor(`does not permit the claim of the model`)

	// known returns three lists of workers: holders of the prompt of a model, eligible workers, and listed workers.
	known := func(model string) (holders, chosen, listed []string) {
		t.Helper()
		var a api.Answer
		if harness.HTTPDo(listen, "POST", "/v1/find", &api.Query{Model: model, Tokens: prompt}, &a) == nil {
			for _, o := range a.Workers {
				if o.Device == 4 {
					holders = append(holders, string(o.Instance))
				}
			}
		}
		var s api.Selection
		r := &api.SelectRequest{Query: api.Query{Model: model, Tokens: prompt, Explain: true}, Advisory: true}
		if harness.HTTPDo(listen, "POST", "/v1/select", r, &s) == nil {
			chosen = append(chosen, string(s.Worker))
		}
		var list api.WorkerList
		if err := harness.HTTPDo(listen, "GET", "/v1/workers", nil, &list); err != nil {
			t.Fatal(err)
		}
		for i := range list.Workers {
			if w := &list.Workers[i]; w.Model == model {
				listed = append(listed, string(w.Instance))
			}
		}
		slices.Sort(holders)
		slices.Sort(listed)
		return holders, chosen, listed
	}
	await := func(what, model string, want ...string) {
		t.Helper()
		harness.Eventually(t, what, func() (bool, string) {
			holders, chosen, listed := known(model)
			ok := slices.Equal(holders, want) && slices.Equal(listed, want) && (len(chosen) == 1) == (len(want) > 0)
			return ok, fmt.Sprintf("holders %v, chosen %v, listed %v", holders, chosen, listed)
		})
	}
	await("without the requirement all count", "m", "evil", "good", "old")

	reload := func() {
		t.Helper()
		write(true)
		if err := server.Cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
	}
	reload()
	await("with the requirement only claims count", "m", "good")
	status := harness.Status(t, x.NATS)
	var named []string
	for _, u := range status.Claims.Unclaimed {
		named = append(named, fmt.Sprintf("%s/%d %s %v %v", u.Instance, u.Rank, u.Model, u.Lease, u.Events))
	}
	if want := []string{"evil/0 m true true", "old/0 m true true"}; !slices.Equal(named, want) ||
		status.Claims.Leases != 2 || status.Claims.Ranks != 2 || !status.Claims.Required {
		t.Errorf("status: %+v; want %v", status.Claims, want)
	}
	doctor := harness.Run(t, "indexer", "doctor", "--nats", x.NATS)
	for _, want := range []string{"its lease is ignored", "evil/0", "old/0", "auth create --shim"} {
		if !strings.Contains(doctor.Stdout, want) {
			t.Errorf("the doctor's output lacks %q:\n%s", want, doctor.Stdout)
		}
	}

	// The old shim is replaced by a shim that may claim the model, the other shim by a shim of the permitted model.
	old.Stop()
	models["old"] = "m"
	reload()
	start("old", "m")
	await("a shim that claims its model counts", "m", "good", "old")
	evil.Stop()
	start("evil", "own")
	await("the worker counts under its own model", "own", "evil")
	await("and under no other", "m", "good", "old")
	harness.Eventually(t, "nothing is ignored", func() (bool, string) {
		s := harness.Status(t, x.NATS)
		return s.Claims.Leases == 0 && s.Claims.Ranks == 0 && s.Claims.Claims == 3, fmt.Sprintf("%+v", s.Claims)
	})
	for _, name := range []string{"evil", "old"} {
		if n := strings.Count(node.Said(), "lease is ignored: the worker has not claimed the model that the lease names\" "+
			"worker="+name+"/0"); n != 1 {
			t.Errorf("the lease of %s was reported %d times", name, n)
		}
	}

	// A rank of a worker has the permitted model, another rank has a forbidden model: a dump has only the first rank.
	start("evil", "m", "--rank", "1")
	harness.Eventually(t, "the second rank is ignored", func() (bool, string) {
		s := harness.Status(t, x.NATS)
		return s.Claims.Ranks == 1, fmt.Sprintf("%+v", s.Claims)
	})
	var dump map[string]struct {
		Events []struct {
			Event struct {
				Rank int `json:"dp_rank"`
			} `json:"event"`
		} `json:"events"`
	}
	if err := harness.HTTPDo(listen, "GET", "/dump", nil, &dump); err != nil {
		t.Fatal(err)
	}
	if own := dump["own:default"].Events; len(own) == 0 || own[0].Event.Rank != 0 || own[len(own)-1].Event.Rank != 0 {
		t.Errorf("the dump of a worker whose second rank is ignored: %+v", dump)
	}
}

package integration

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

// TestEndpoints queries two nodes by workers' serving addresses, over HTTP, NATS and the command line. An answer is
// limited to the addresses, and names unknown addresses.
func TestEndpoints(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	var nodes []*harness.Indexer
	for i := range 2 {
		x := &harness.Indexer{NATS: nats, Process: harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id",
			fmt.Sprint("n", i), "--partitions", "4", "--http-listen", "127.0.0.1:0")}
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		nodes = append(nodes, x)
	}
	prompt := harness.Tokens(1, 10*harness.BlockSize)
	for i, args := range [][]string{{"--serving-endpoint", "http://w1:8000"}, {"--serving-endpoint", "10.0.0.2:80"}, nil} {
		engine := harness.StartSimEngine(t)
		harness.StartSimShim(t, engine, nats, fmt.Sprint("w", i+1), args...)
		harness.ServePrompt(t, engine, prompt[:(6-i)*harness.BlockSize])
		nodes[0].WaitDepth(t, "m", prompt, fmt.Sprint("w", i+1), uint32(6-i))
	}
	ctx := harness.Context(t)
	over, err := client.NATS(connectNATS(t, "nats://"+nats), "default", client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer over.Close()
	clients := []*client.Client{over}
	for _, x := range nodes {
		c := harness.Ask(t, x.HTTP)
		clients = append(clients, c)
	}
	one := api.Overlap{Instance: "w1", Device: 6, Endpoint: "http://w1:8000"}
	two := api.Overlap{Instance: "w2", Device: 5, Endpoint: "10.0.0.2:80"}
	three := api.Overlap{Instance: "w3", Device: 4}
	for _, c := range []struct {
		query   api.Query
		workers []api.Overlap
		by      map[string][]api.Overlap
		unknown []string
		reason  api.Reason
	}{
		{api.Query{}, []api.Overlap{{Instance: "w1", Device: 6}, {Instance: "w2", Device: 5}, three}, nil, nil, ""},
		{api.Query{WithEndpoint: true}, []api.Overlap{one, two, three}, nil, nil, ""},
		{api.Query{Endpoints: []string{"10.0.0.2:80"}}, []api.Overlap{two}, nil, nil, ""},
		{api.Query{Endpoints: []string{"http://10.0.0.2:80", "10.0.0.2:80", "w3"}}, []api.Overlap{two}, nil,
			[]string{"http://10.0.0.2:80", "w3"}, ""},
		{api.Query{Endpoints: []string{"w3"}}, []api.Overlap{}, nil, []string{"w3"}, api.ReasonNotAllowed},
		{api.Query{ByEndpoint: true}, []api.Overlap{three},
			map[string][]api.Overlap{"http://w1:8000": {one}, "10.0.0.2:80": {two}}, nil, ""},
		{api.Query{ByEndpoint: true, Endpoints: []string{"http://w1:8000", "x"}}, []api.Overlap{},
			map[string][]api.Overlap{"http://w1:8000": {one}}, []string{"x"}, ""},
	} {
		c.query.Model, c.query.Tokens = "m", prompt
		for i, ask := range clients {
			harness.Eventually(t, fmt.Sprintf("client %d is answered %+v", i, c.query), func() (bool, string) {
				a, err := ask.Find(ctx, &c.query)
				return err == nil && a.Complete && reflect.DeepEqual(a.Workers, c.workers) && len(a.ByEndpoint) == len(c.by) &&
					(len(c.by) == 0 || reflect.DeepEqual(a.ByEndpoint, c.by)) && a.Reason == c.reason &&
					reflect.DeepEqual(a.UnknownEndpoints, c.unknown), fmt.Sprintf("%+v %v", a, err)
			})
		}
	}
	for i, ask := range clients {
		r := &api.SelectRequest{Query: api.Query{Model: "m", Tokens: prompt, Endpoints: []string{"10.0.0.2:80", "x"}}}
		if s, err := ask.Select(ctx, r); err != nil || s.Worker != "w2" || s.Endpoint != "10.0.0.2:80" ||
			!reflect.DeepEqual(s.UnknownEndpoints, []string{"x"}) {
			t.Errorf("client %d: %+v, %v", i, s, err)
		}
		r.Endpoints = []string{"x", "y"}
		if _, err := ask.Select(ctx, r); client.CodeOf(err) != api.CodeNoWorkers || !strings.Contains(err.Error(), "x, y") {
			t.Errorf("client %d: %v", i, err)
		}
	}
	words := strings.Trim(harness.JSONList(prompt), "[]")
	r := harness.Run(t, "indexer", "query", "--nats", nats, "--model", "m", "--tokens", words, "--endpoint",
		"http://w1:8000", "--endpoint", "gone")
	for _, want := range []string{"no worker of the model is registered at gone\n", "ENDPOINT", "http://w1:8000"} {
		if r.Code != 0 || !strings.Contains(r.Stdout, want) || strings.Contains(r.Stdout, "w2") {
			t.Errorf("query printed %d %q %q, want %q", r.Code, r.Stdout, r.Stderr, want)
		}
	}
	r = harness.Run(t, "indexer", "select", "--nats", nats, "--model", "m", "--tokens", words, "--endpoint", "gone",
		"--endpoint", "10.0.0.2:80")
	if r.Code != 0 || !strings.Contains(r.Stdout, "worker w2 rank 0 at 10.0.0.2:80") ||
		!strings.Contains(r.Stdout, "no worker of the model is registered at gone\n") {
		t.Errorf("select printed %d %q %q", r.Code, r.Stdout, r.Stderr)
	}
}

package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/internal/ingest/enginehttp"
	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

func lookAtNATS(ctx context.Context, x *examination) (string, error) {
	x.conn, x.facts.ConnectError = x.cfg.Connect(ctx)
	if x.facts.ConnectError != nil {
		x.client = x.cfg.OverHTTP
		return x.cfg.Shown, nil
	}
	var err error
	if x.client, err = client.NATS(x.conn.NATS(), x.cfg.Namespace, client.Options{}); err != nil {
		return "", err
	}
	if x.facts.Server, err = x.conn.Server(ctx); err != nil {
		return x.cfg.Shown, err
	}
	s := &x.facts.Server
	return fmt.Sprintf("%s, nats-server %s at %s, %v away", s.Name, s.Version, s.URL,
		s.RoundTrip.Round(10*time.Microsecond)), nil
}

func lookAtJetStream(ctx context.Context, x *examination) (string, error) {
	a, err := x.conn.Account(ctx)
	if errors.Is(err, jetstream.ErrNoJetStream) || errors.Is(err, jetstream.ErrNoLeader) {
		x.facts.AccountError = err
		return "the account", nil
	}
	x.facts.Account = a
	return fmt.Sprintf("API level %d, %s, %d bytes stored", a.Level, plural(a.Streams, "stream"), a.Storage), err
}

func lookAtNamespace(ctx context.Context, x *examination) (string, error) {
	ns, err := jetstream.OpenNamespace(ctx, x.conn, x.cfg.Namespace)
	if errors.Is(err, jetstream.ErrNoNamespace) || errors.Is(err, jetstream.ErrBadRecord) {
		if lost := jetstream.LostRecord(ctx, x.conn, x.cfg.Namespace); lost != nil {
			err = lost
		}
	}
	switch {
	case errors.Is(err, jetstream.ErrNoNamespace), errors.Is(err, jetstream.ErrMismatch),
		errors.Is(err, jetstream.ErrBadRecord), errors.Is(err, jetstream.ErrNotFound):
		x.facts.OpenError = err
		return x.cfg.Namespace, nil
	case err != nil:
		return x.cfg.Namespace, err
	}
	x.ns, x.facts.Partitions = ns, ns.Partitions()
	return fmt.Sprintf("%s, %s", ns.Name(), plural(int(ns.Partitions()), "partition")), nil
}

func lookAtStreams(ctx context.Context, x *examination) (string, error) {
	x.facts.Streams = x.ns.Inspect(ctx)
	for i := range x.facts.Streams {
		if s := &x.facts.Streams[i]; s.Err != nil && (errors.Is(s.Err, jetstream.ErrDenied) || ctx.Err() != nil) {
			return "", s.Err
		}
	}
	return plural(len(x.facts.Streams), "stream") + ", buckets included", nil
}

func lookAtNodes(ctx context.Context, x *examination) (string, error) {
	x.facts.Nodes, x.facts.NodesError = survey.Nodes(ctx, x.client)
	if err := x.facts.NodesError; err != nil {
		if client.CodeOf(err) == api.CodeForbidden {
			return "", err
		}
		return "whoever answers", nil
	}
	return plural(len(x.facts.Nodes.Nodes), "node"), nil
}

// clockAsked bounds the nodes in a comparison of clocks.
const clockAsked = 64

func lookAtClocks(ctx context.Context, x *examination) (string, error) {
	shift := time.Until(x.cfg.Now())
	seen := map[string]bool{}
	for i := range x.facts.Streams {
		if s := &x.facts.Streams[i]; s.Err == nil && !seen[s.Server] {
			seen[s.Server] = true
			x.facts.Clocks = append(x.facts.Clocks, Clock{"NATS server " + s.Server, s.Ahead - shift})
		}
	}
	nodes := 0
	if x.facts.Nodes != nil {
		for _, n := range x.facts.Nodes.Nodes[:min(len(x.facts.Nodes.Nodes), clockAsked)] {
			if n.Status == nil {
				continue
			}
			asked := time.Now()
			s, err := x.client.StatusOf(ctx, n.Node)
			if err != nil || s.Now.IsZero() {
				continue // the nodes check reports this, or the node has an earlier version
			}
			nodes++
			x.facts.Clocks = append(x.facts.Clocks, Clock{"node " + n.Node,
				jetstream.Ahead(s.Now, asked, time.Now()) - shift})
		}
	}
	if len(x.facts.Clocks) == 0 {
		return "", errSkipped{"no NATS server and no node reports its time"}
	}
	return fmt.Sprintf("this host's, %s, %s", plural(len(seen), "NATS server"), plural(nodes, "node")), nil
}

func lookAtReplicas(ctx context.Context, x *examination) (string, error) {
	s, err := x.client.Verify(ctx, nil)
	if err != nil {
		return "", err
	}
	x.facts.Replicas = s.Replicas
	copies := 0
	for i := range s.Replicas {
		copies = max(copies, len(s.Replicas[i].Replicas))
	}
	if copies < 2 {
		return "", errSkipped{"every partition has a single replica: no comparison is possible"}
	}
	return fmt.Sprintf("%s, %s each at most", plural(len(s.Replicas), "partition"), plural(copies, "replica")), nil
}

func lookAtWorkers(ctx context.Context, x *examination) (string, error) {
	list, err := x.client.Workers(ctx)
	if err != nil {
		return "", err
	}
	x.facts.Workers = list
	looked := plural(len(list.Workers), "rank")
	if x.ns == nil {
		return looked + "; without the records of their shims, because the namespace is unreadable", nil
	}
	if x.facts.Records, err = registry.Records(ctx, x.ns); err != nil {
		return looked, err
	}
	return looked, nil
}

func lookAtModels(_ context.Context, x *examination) (string, error) {
	models := map[string]bool{}
	for i := range x.facts.Workers.Workers {
		models[x.facts.Workers.Workers[i].Model] = true
	}
	if len(models) == 0 {
		return "", errSkipped{"no worker is registered"}
	}
	looked := plural(len(models), "model")
	if x.ns == nil {
		looked += "; without their shared stores, because the namespace is unreadable"
	}
	return looked, nil
}

func lookAtShims(ctx context.Context, x *examination) (string, error) {
	partitions := map[events.Partition]bool{}
	for i := range x.facts.Workers.Workers {
		partitions[x.facts.Workers.Workers[i].Partition] = true
	}
	if len(partitions) == 0 {
		return "", errSkipped{"no worker is registered"}
	}
	var mu sync.Mutex
	var first error
	var all sync.WaitGroup
	for p := range partitions {
		all.Go(func() {
			shims, err := control.ShimsOf(ctx, x.ns, p)
			mu.Lock()
			defer mu.Unlock()
			x.facts.Shims = append(x.facts.Shims, shims...)
			if err != nil && first == nil {
				first = err
			}
		})
	}
	all.Wait()
	return plural(len(x.facts.Shims), "shim"), first
}

// enginesAtOnce bounds the concurrent requests to engines.
const enginesAtOnce = 16

func lookAtEngines(ctx context.Context, x *examination) (string, error) {
	index := map[string]int{}
	for i := range x.facts.Workers.Workers {
		w := &x.facts.Workers.Workers[i]
		if w.Record == nil || w.Lease == nil || !strings.HasPrefix(w.Record.Endpoint, "http") {
			continue
		}
		key := string(w.Instance) + " " + w.Record.Endpoint
		if _, known := index[key]; !known {
			index[key] = len(x.facts.Engines)
			x.facts.Engines = append(x.facts.Engines, EngineFacts{Worker: w.Instance, URL: w.Record.Endpoint,
				Model: w.Model, BlockSize: w.BlockSize})
		}
		x.facts.Engines[index[key]].Ranks++
	}
	if len(x.facts.Engines) == 0 {
		return "", errSkipped{"no worker is registered with an http:// address; worker-shim run --engine-http " +
			"or --serving-endpoint registers the address"}
	}
	slots := make(chan struct{}, enginesAtOnce)
	var all sync.WaitGroup
	for i := range x.facts.Engines {
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			e := &x.facts.Engines[i]
			token := ""
			if u, err := url.Parse(e.URL); err == nil && x.cfg.EngineAddresses.Contains(u) {
				token = x.cfg.EngineToken
			}
			asker, err := enginehttp.New(e.URL, token, x.cfg.Rule)
			if e.Err = err; err == nil {
				e.Reported, e.Err = asker.Ask(ctx)
			}
		})
	}
	all.Wait()
	return plural(len(x.facts.Engines), "engine") + " over HTTP", nil
}

func lookAtStores(_ context.Context, x *examination) (string, error) {
	stores := map[string]bool{}
	for _, n := range x.facts.Nodes.Nodes {
		if n.Status != nil {
			for i := range n.Status.L3 {
				stores[n.Status.L3[i].Store] = true
			}
		}
	}
	if len(stores) == 0 {
		return "", errSkipped{"no worker has a shared store"}
	}
	return plural(len(stores), "store"), nil
}

func lookAtTokenizers(ctx context.Context, x *examination) (string, error) {
	models := map[string]uint32{} // and a block size of each
	for _, n := range x.facts.Nodes.Nodes {
		if n.Status != nil {
			for i := range n.Status.Models {
				models[n.Status.Models[i].Model] = n.Status.Models[i].BlockSize
			}
		}
	}
	if len(models) == 0 {
		return "", errSkipped{"no model has a worker"}
	}
	for model, size := range models {
		a, err := x.client.Find(ctx, &api.Query{Model: model, BlockSize: size, Text: &api.Text{Prompt: "the doctor asks"},
			L3: api.L3Off, Diagnostic: true})
		switch {
		case client.CodeOf(err) == api.CodeMalformed:
			return "", errSkipped{"the nodes have no tokenizers (indexer serve --tokenizers)"}
		case err != nil:
			return "", err
		case a.Tokenization == nil:
			continue
		}
		x.facts.Tokenizers = append(x.facts.Tokenizers, TokenizerFacts{model, a.TokenizeError})
	}
	return plural(len(x.facts.Tokenizers), "model"), nil
}

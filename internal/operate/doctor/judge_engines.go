package doctor

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/ingest/enginehttp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

func judgeEngines(f *Facts) (list []Finding) {
	for i := range f.Engines {
		e := &f.Engines[i]
		where := fmt.Sprintf("%s at %s", e.Worker, e.URL)
		found := func(id Fault, severity Severity, what, evidence, remedy string) {
			list = append(list, finding(severity, id, where, what, evidence, remedy).about(events.RankKey{Instance: e.Worker},
				true))
		}
		switch {
		case errors.Is(e.Err, enginehttp.ErrNoEvents):
			found(engineNoEvents, Error, "the engine publishes no events to its shim", e.Err.Error(),
				`restart it with --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",`+
					`"replay_endpoint":"tcp://*:5657"}'`)
			continue
		case errors.Is(e.Err, enginehttp.ErrNotReady):
			found(engineUnreachable, Warning, "the engine does not answer over HTTP from this host", e.Err.Error(),
				"check the engine and the route to its port; correct a wrong address with indexer workers change "+
					"--endpoint URL "+escape.Operand(string(e.Worker)))
			continue
		case e.Err != nil:
			found(engineUnknown, Warning, "the server does not report event settings", e.Err.Error(),
				"give --engine-http-token-file and --engine-address if it requires an API key; "+
					"ignore this if the port is not an engine's")
			continue
		}
		reported := e.Reported
		if reported.BlockSize != 0 && reported.BlockSize != e.BlockSize {
			found(engineBlockSize, Error, "the engine and its shim have different block sizes",
				fmt.Sprintf("%s %s has %d tokens, the shim %d", reported.Kind, reported.Version, reported.BlockSize, e.BlockSize),
				fmt.Sprintf("start worker-shim run with --block-size %d, or without: --engine-http reads it; "+
					"if it refuses: indexer workers clear %s, then indexer models remove %s", reported.BlockSize,
					escape.Operand(string(e.Worker)), escape.Operand(e.Model)))
		}
		if reported.Model != "" && reported.Model != e.Model {
			found(engineModel, Warning, "the engine serves the model under another name",
				fmt.Sprintf("%q in the engine, %q in the shim", reported.Model, e.Model),
				"if routers use the engine's name: worker-shim run --model "+escape.Shell(reported.Model))
		}
		if reported.UnnamedAdapters {
			found(engineAdapters, Error, "the engine's events do not name adapters",
				fmt.Sprintf("%s %s serves adapters; blocks of adapters and of the base model look alike, so the shim skips them",
					reported.Kind, reported.Version), enginehttp.NameAdapters)
		}
		for _, r := range reported.Ranks {
			if r.Replay == "" {
				found(engineNoReplay, Warning, "the engine has no replay endpoint",
					fmt.Sprintf("rank %d publishes only at %s", r.Rank, r.Endpoint),
					`add "replay_endpoint":"tcp://*:5657" to --kv-events-config`)
			}
		}
		if len(reported.Ranks) > e.Ranks {
			found(ranksUnserved, Error, "ranks of the engine have no shim",
				fmt.Sprintf("it has %d ranks, %d are registered", len(reported.Ranks), e.Ranks),
				fmt.Sprintf("worker-shim run --ranks %d, or --engine-http %s, which serves all ranks", len(reported.Ranks),
					escape.Shell(e.URL)))
		}
	}
	return list
}

func judgeStores(f *Facts) (list []Finding) {
	for _, n := range f.Nodes.Nodes {
		if n.Status == nil {
			continue
		}
		for i := range n.Status.L3 {
			s := &n.Status.L3[i]
			found := func(id Fault, severity Severity, what, evidence, remedy string) {
				where := fmt.Sprintf("node %s, store %s", n.Node, s.Store)
				list = append(list, finding(severity, id, where, what, evidence, remedy))
			}
			if s.Down != "" {
				found(storeDown, Error, "the node does not query the store: its blocks count for no worker", s.Down,
					"check the store's master and the route from the node's host to the master's HTTP port; the address is "+
						"that of worker-shim's --l3-config")
			}
			if s.Busy > 0 {
				found(storeBusy, Warning, "queries skipped the store because of too many store requests in progress",
					fmt.Sprintf("%d of %d", s.Busy, s.Busy+s.Questions),
					"give the store's master more resources, or read its events: worker-shim run --source mooncake")
			}
			if s.Set != nil && (!s.Set.Whole || s.Set.Overflows > 0) {
				found(storeEvents, Warning, "the store's events are incomplete",
					fmt.Sprintf("gaps %d, overflows %d, lists %d", s.Set.Gaps, s.Set.Overflows, s.Set.Lists),
					"check that worker-shim run --source mooncake runs for this store")
			}
		}
	}
	return list
}

func judgeTokenizers(f *Facts) (list []Finding) {
	slices.SortFunc(f.Tokenizers, func(a, b TokenizerFacts) int { return strings.Compare(a.Model, b.Model) })
	for _, t := range f.Tokenizers {
		if t.Error != "" {
			list = append(list, finding(Error, tokenizerFailed, "model "+t.Model,
				"texts are not tokenized: requests with text find no blocks", t.Error,
				"correct the model's entry in the file of indexer serve --tokenizers; "+
					"indexer tokenizer check compares it with the engine"))
		}
	}
	return list
}

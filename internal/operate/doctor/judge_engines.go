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
			found(engineNoEvents, Error, "the engine publishes no events that its shim could hear", e.Err.Error(),
				`restart it with --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",`+
					`"replay_endpoint":"tcp://*:5657"}'`)
			continue
		case errors.Is(e.Err, enginehttp.ErrNotReady):
			found(engineUnreachable, Warning, "the engine does not answer over HTTP from this host", e.Err.Error(),
				"see that it runs and that its port can be reached from here; change a wrong address with indexer workers change "+
					"--endpoint URL "+escape.Operand(string(e.Worker)))
			continue
		case e.Err != nil:
			found(engineUnknown, Warning, "what answers does not say how it publishes", e.Err.Error(),
				"give --engine-http-token-file and --engine-address if it wants an API key; if this is no engine's own port, nothing is wrong")
			continue
		}
		said := e.Said
		if said.BlockSize != 0 && said.BlockSize != e.BlockSize {
			found(engineBlockSize, Error, "the engine's blocks have another size than its shim says",
				fmt.Sprintf("%s %s has %d tokens, the shim %d", said.Kind, said.Version, said.BlockSize, e.BlockSize),
				fmt.Sprintf("start worker-shim run with --block-size %d, or without: --engine-http learns it; "+
					"if it refuses: indexer forget %s, then indexer forget --model %s", said.BlockSize,
					escape.Operand(string(e.Worker)), escape.Shell(e.Model)))
		}
		if said.Model != "" && said.Model != e.Model {
			found(engineModel, Warning, "the engine serves the model under another name",
				fmt.Sprintf("the engine says %q, the shim %q", said.Model, e.Model),
				"if routers ask for the engine's name: worker-shim run --model "+escape.Shell(said.Model))
		}
		if said.UnnamedAdapters {
			found(engineAdapters, Error, "the engine's events do not name adapters",
				fmt.Sprintf("%s %s serves adapters; a block may be an adapter's or the base model's, so its shim skips them",
					said.Kind, said.Version), enginehttp.NameAdapters)
		}
		for _, r := range said.Ranks {
			if r.Replay == "" {
				found(engineNoReplay, Warning, "the engine has no replay endpoint",
					fmt.Sprintf("rank %d publishes at %s alone", r.Rank, r.Endpoint),
					`add "replay_endpoint":"tcp://*:5657" to --kv-events-config`)
			}
		}
		if len(said.Ranks) > e.Ranks {
			found(ranksUnserved, Error, "ranks of the engine have no shim",
				fmt.Sprintf("it has %d ranks, %d are registered", len(said.Ranks), e.Ranks),
				fmt.Sprintf("worker-shim run --ranks %d, or --engine-http %s, which finds all", len(said.Ranks),
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
				found(storeDown, Error, "the node does not ask the store: its blocks count for nobody", s.Down,
					"see that the store's master runs, and that its HTTP port can be reached from the node's host; the address is "+
						"that of worker-shim's --l3-config")
			}
			if s.Busy > 0 {
				found(storeBusy, Warning, "queries went without the store, as too many questions were under way",
					fmt.Sprintf("%d of %d", s.Busy, s.Busy+s.Questions),
					"give the store's master more room, or have its events heard: worker-shim run --source mooncake")
			}
			if s.Set != nil && (!s.Set.Whole || s.Set.Overflows > 0) {
				found(storeEvents, Warning, "what the store's events say is not whole",
					fmt.Sprintf("gaps %d, overflows %d, lists %d", s.Set.Gaps, s.Set.Overflows, s.Set.Lists),
					"see that worker-shim run --source mooncake runs for this store")
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
				"texts are not tokenized: requests that bring text find nothing", t.Error,
				"mend the model's entry in the file of indexer serve --tokenizers; "+
					"indexer tokenizer check compares it with the engine"))
		}
	}
	return list
}

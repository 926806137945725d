package cli

import (
	"strings"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/spf13/pflag"
)

// WorkerFlags are the flags that say what a choice of worker needs to know of one.
type WorkerFlags struct {
	flags                     *pflag.FlagSet
	spec                      api.WorkerSpec
	role                      string
	taints, domains, adapters []string
	names                     []string
}

// AddWorkerFlags adds them. endpoint is the name of the flag for where the worker takes requests.
func AddWorkerFlags(f *pflag.FlagSet, endpoint string) *WorkerFlags {
	w := &WorkerFlags{flags: f}
	f.StringVar(&w.spec.Endpoint, endpoint, "", "where the worker takes requests, as routers address it: http://HOST:PORT")
	f.StringVar(&w.role, "role", "", "what it computes of a request: aggregated (the default), prefill or decode")
	f.Uint64Var(&w.spec.TotalKVBlocks, "total-kv-blocks", 0, "blocks that each rank's device memory has room for")
	f.Uint64Var(&w.spec.MaxBatchedTokens, "max-num-batched-tokens", 0, "tokens that each rank computes in a step at most")
	f.StringVar(&w.spec.StableRoutingID, "stable-routing-id", "",
		"a name that stays when the worker comes back under another")
	f.StringSliceVar(&w.taints, "taint", nil, "a taint, which requests prefer or require; may be given again")
	f.StringSliceVar(&w.domains, "topology", nil, "DOMAIN=VALUE: where it stands, such as zone=eu-1; may be given again")
	f.StringSliceVar(&w.adapters, "lora-adapter", nil, "a LoRA adapter that it serves; may be given again")
	f.StringSliceVar(&w.names, "served-model-name", nil,
		"a further name of the model that the engine accepts in requests; may be given again")
	return w
}

// AddRange adds the flags of the rank range, where nothing else says it.
func (w *WorkerFlags) AddRange(f *pflag.FlagSet) {
	f.Uint32Var(&w.spec.RankStart, "rank-start", 0, "the first of its data-parallel ranks; with --rank-size")
	f.Uint32Var(&w.spec.RankSize, "rank-size", 0, "how many ranks it has")
}

// Said reports whether a flag was given.
func (w *WorkerFlags) Said(flag string) bool { return w.flags.Changed(flag) }

// Spec is what the flags say. A list that is given as nothing, as in --taint "", says that there is none. The error is
// one of usage.
func (w *WorkerFlags) Spec() (*api.WorkerSpec, error) {
	s := w.spec
	s.Role = api.Role(w.role)
	for _, l := range []struct {
		name string
		from []string
		to   *[]string
	}{{"taint", w.taints, &s.Taints}, {"lora-adapter", w.adapters, &s.LoRAAdapters},
		{"served-model-name", w.names, &s.ServedNames}} {
		if w.flags.Changed(l.name) {
			*l.to = append([]string{}, l.from...)
		}
	}
	if w.flags.Changed("topology") {
		s.TopologyDomains = map[string]string{}
		for _, text := range w.domains {
			name, value, ok := strings.Cut(text, "=")
			if !ok {
				return nil, UsageErrorf("--topology %q is not DOMAIN=VALUE", text)
			}
			s.TopologyDomains[name] = value
		}
	}
	if err := s.Check(); err != nil {
		return nil, UsageErrorf("%s", api.AsError(err).Message)
	}
	return &s, nil
}

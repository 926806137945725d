package cli

import (
	"strings"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/spf13/pflag"
)

// WorkerFlags are the flags of a worker's record for choices. The zero value has no flags: see [WorkerFlags.Rows].
type WorkerFlags struct {
	flags                     *pflag.FlagSet
	spec                      api.WorkerSpec
	role                      string
	taints, domains, adapters []string
	names                     []string
}

// Rows returns the table of the flags. endpoint is the name of the flag for the serving address.
func (w *WorkerFlags) Rows(endpoint string) Flags {
	return Flags{
		{add: func(f *pflag.FlagSet) { w.flags = f }, check: func(*Complaints) {}},
		Var(&w.spec.Endpoint, endpoint, "",
			"address for requests of routers to the worker: http://HOST:PORT"),
		Var(&w.role, "role", "",
			"the worker's part of a request: aggregated (the default), prefill, decode or encode"),
		Var(&w.spec.BootstrapPort, "bootstrap-port", 0,
			"port where an SGLang prefill worker meets decode workers (SGLang's --disaggregation-bootstrap-port)"),
		Var(&w.spec.TotalKVBlocks, "total-kv-blocks", 0,
			"capacity of each rank's device memory, in blocks"),
		Var(&w.spec.MaxBatchedTokens, "max-num-batched-tokens", 0,
			"maximum tokens that a rank computes in a step"),
		Var(&w.spec.StableRoutingID, "stable-routing-id", "",
			"a stable name for a worker that returns under another name"),
		Var(&w.taints, "taint", nil,
			"a taint, which requests prefer or require; may be repeated"),
		Var(&w.domains, "topology", nil,
			"DOMAIN=VALUE: the worker's place, such as zone=eu-1; may be repeated"),
		Var(&w.adapters, "lora-adapter", nil,
			"a served LoRA adapter, or * if the worker loads any adapter on request; may be repeated"),
		Var(&w.names, "served-model-name", nil,
			"a further name of the model for requests; may be repeated"),
	}
}

// RangeRows returns the table of the flags with the flags of the rank range, if no other source provides the range.
func (w *WorkerFlags) RangeRows(endpoint string) Flags {
	return append(w.Rows(endpoint),
		Var(&w.spec.RankStart, "rank-start", 0, "the worker's first data-parallel rank; with --rank-size"),
		Var(&w.spec.RankSize, "rank-size", 0, "number of the worker's ranks"),
	)
}

// Spec returns the record of the flags. An empty list, as in --taint "", removes all entries. The error is a usage
// error.
func (w *WorkerFlags) Spec() (api.WorkerSpec, error) {
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
				return api.WorkerSpec{}, UsageErrorf("--topology %q is not DOMAIN=VALUE", text)
			}
			s.TopologyDomains[name] = value
		}
	}
	if err := s.Check(); err != nil {
		return api.WorkerSpec{}, UsageErrorf("%s", api.AsError(err).Message)
	}
	return s, nil
}

package whatif

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/routesim"
)

// Worker is a rank that computes prompts.
type Worker struct {
	Name         string `json:"name"`
	DeviceBlocks int    `json:"device_blocks"` // capacity; 0: unknown
	HostBlocks   int    `json:"host_blocks"`   // 0: no host tier
	Held         bool   `json:"held"`          // DeviceBlocks is the number of blocks held now: the capacity is unknown
	BatchTokens  int    `json:"max_num_batched_tokens,omitempty"`
}

// Fleet has the workers of a model, in order of their names.
type Fleet struct {
	Workers []Worker `json:"workers"`
	Skipped []string `json:"skipped,omitempty"` // registered workers that may not be chosen now
}

// FleetOf returns the workers of a model that may be chosen.
func FleetOf(list *api.WorkerList, model string) (*Fleet, error) {
	f := &Fleet{}
	for i := range list.Workers {
		w := &list.Workers[i]
		if w.Model != model {
			continue
		}
		name := workerName(string(w.Instance), uint32(w.Rank))
		if w.Record == nil || w.Record.State != api.WorkerSchedulable {
			f.Skipped = append(f.Skipped, name)
			continue
		}
		if r := w.Record.Role; r == api.RolePrefill || r == api.RoleDecode {
			return nil, fmt.Errorf("worker %s has the role %s: separate prefill and decode workers cannot be simulated", name,
				r)
		}
		x := Worker{Name: name, DeviceBlocks: int(min(w.Record.TotalKVBlocks, maxBlocks)),
			HostBlocks:  int(min(w.Blocks.Host, maxBlocks)),
			BatchTokens: int(min(w.Record.MaxBatchedTokens, maxTokens))}
		if x.DeviceBlocks == 0 {
			x.DeviceBlocks, x.Held = int(min(w.Blocks.Device, maxBlocks)), true
		}
		f.Workers = append(f.Workers, x)
	}
	if len(f.Workers) == 0 {
		return nil, fmt.Errorf("no worker of model %q may be chosen now; indexer workers lists the reasons", model)
	}
	return f, nil
}

// Fleet returns the recorded workers, with unknown capacities.
func (in *Input) Fleet() *Fleet {
	f := &Fleet{}
	for _, name := range recordedWorkers(in.list) {
		f.Workers = append(f.Workers, Worker{Name: name, Held: true})
	}
	return f
}

// recordedWorkers returns the names of the chosen workers, sorted.
func recordedWorkers(list []*request) (names []string) {
	seen := map[string]bool{}
	for _, x := range list {
		if !seen[x.worker] {
			seen[x.worker] = true
			names = append(names, x.worker)
		}
	}
	slices.Sort(names)
	return names
}

// maxBlocks bounds the capacity of a tier of a worker.
const maxBlocks = 1 << 30

// Amount is an absolute size, or a factor.
type Amount struct {
	Factor float64 `json:"factor,omitempty"` // 0: an absolute size
	Tokens int     `json:"tokens,omitempty"`
}

// Changes are the changes to simulate. The zero value has none.
type Changes struct {
	Workers  int     `json:"workers,omitempty"` // added; below 0: removed
	Capacity *Amount `json:"capacity,omitempty"`
	Host     *Amount `json:"host_tier,omitempty"`
	Policy   string  `json:"policy,omitempty"`
	Routers  int     `json:"routers,omitempty"` // with an index and loads of their own; 0: shared, as now
}

// none reports whether there are no changes.
func (c *Changes) none() bool { return *c == Changes{} }

// ParseWorkers parses the change of the number of workers: +N or -N. An empty text is no change.
func ParseWorkers(text string) (int, error) {
	if text == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || text[0] != '+' && text[0] != '-' || n < -1000 || n > 1000 {
		return 0, fmt.Errorf("%q is not the number of workers to add or remove, such as +2 or -1, up to 1,000", text)
	}
	return n, nil
}

var units = []struct {
	suffix string
	bytes  float64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}}

// ParseAmount parses a factor such as 2x, a number of tokens, or bytes such as 200GiB. tokenBytes is the size of the KV
// cache of a token; 0: unknown. An empty text is no change.
func ParseAmount(text string, tokenBytes int) (*Amount, error) {
	if text == "" {
		return nil, nil
	}
	bad := fmt.Errorf("%q is no factor such as 2x, number of tokens, or size such as 200GiB", text)
	if number, ok := strings.CutSuffix(text, "x"); ok {
		x, err := strconv.ParseFloat(number, 64)
		if err != nil || !(x >= 0.01 && x <= 100) {
			return nil, fmt.Errorf("%w; a factor is from 0.01 to 100", bad)
		}
		return &Amount{Factor: x}, nil
	}
	number, scale := text, 1.0
	for _, u := range units {
		if n, ok := strings.CutSuffix(text, u.suffix); ok {
			if tokenBytes <= 0 {
				return nil, fmt.Errorf("%q: the size of a token's KV cache is unknown; add --token-bytes (2 x layers x KV heads "+
					"x head size x bytes of a number), or give tokens", text)
			}
			number, scale = n, u.bytes/float64(tokenBytes)
		}
	}
	x, err := strconv.ParseFloat(number, 64)
	if err != nil || !(x >= 0 && x*scale <= maxBlocks) {
		return nil, bad
	}
	return &Amount{Tokens: int(x * scale)}, nil
}

// of returns the changed size of a tier in blocks.
func (a *Amount) of(blocks, blockSize int) int {
	switch {
	case a == nil:
		return blocks
	case a.Factor > 0:
		return int(min(a.Factor*float64(blocks), maxBlocks))
	}
	return a.Tokens / blockSize
}

// changed returns the fleet with the changes. A removed worker is the last one, and an added worker equals the first.
func (f *Fleet) changed(c *Changes, blockSize int) (*Fleet, error) {
	list := slices.Clone(f.Workers)
	if c.Workers < 0 {
		if -c.Workers >= len(list) {
			return nil, fmt.Errorf("--workers %d leaves none of %d workers", c.Workers, len(list))
		}
		list = list[:len(list)+c.Workers]
	}
	for i := range list {
		w := &list[i]
		if c.Host != nil && c.Host.Factor > 0 && w.HostBlocks == 0 {
			return nil, errors.New("--host-tier is a factor, but no host tier is known; give a size")
		}
		w.DeviceBlocks, w.HostBlocks = c.Capacity.of(w.DeviceBlocks, blockSize), c.Host.of(w.HostBlocks, blockSize)
		if w.DeviceBlocks == 0 {
			return nil, fmt.Errorf("the capacity of worker %s is unknown or 0: register total_kv_blocks (worker-shim run "+
				"--total-kv-blocks), or give --fleet-capacity", w.Name)
		}
	}
	for i := range max(0, c.Workers) {
		w := list[0]
		w.Name = "added " + strconv.Itoa(i+1)
		list = append(list, w)
	}
	if len(list) > 1024 {
		return nil, fmt.Errorf("%d workers are more than 1,024", len(list))
	}
	return &Fleet{Workers: list}, nil
}

// apply sets the sizes of a workload's engines.
func (f *Fleet) apply(w *routesim.Workload) {
	e := &w.Engine
	host, most := 0, 0
	for _, x := range f.Workers {
		most, host = max(most, x.DeviceBlocks), host+x.HostBlocks
	}
	w.Workers, w.Capacities = len(f.Workers), nil
	e.Capacity, e.Host = most*e.BlockSize, host/len(f.Workers)*e.BlockSize
	for _, x := range f.Workers {
		w.Capacities = append(w.Capacities, float64(x.DeviceBlocks)/float64(most))
	}
}

// batchTokens returns the least registered number of tokens of a step; 0: unknown.
func (f *Fleet) batchTokens() (n int) {
	for _, w := range f.Workers {
		if w.BatchTokens > 0 && (n == 0 || w.BatchTokens < n) {
			n = w.BatchTokens
		}
	}
	return n
}

// smallest returns the least capacity in blocks.
func (f *Fleet) smallest() int {
	return slices.MinFunc(f.Workers, func(a, b Worker) int { return a.DeviceBlocks - b.DeviceBlocks }).DeviceBlocks
}

func joined(names []string) string {
	slices.Sort(names)
	if len(names) > 10 {
		names = append(names[:10:10], fmt.Sprintf("%d more", len(names)-10))
	}
	return strings.Join(names, ", ")
}

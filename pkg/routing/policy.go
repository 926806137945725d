package routing

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Filter drops candidates. It must be safe for concurrent use.
type Filter interface {
	// Name returns the filter's name in explanations.
	Name() string

	// Filter calls v.Drop for candidates to exclude. The candidates stay in v until Filter returns.
	Filter(v *View)
}

// Scorer calculates costs of candidates. It must be safe for concurrent use.
type Scorer interface {
	// Name returns the scorer's name in explanations.
	Name() string

	// Score sets cost[i] for each candidate v.At(i). The previous value is 0. Costs may be negative. The sums of all
	// scorers must be finite.
	Score(v *View, cost []float64)
}

// Picker chooses among the remaining candidates. It must be safe for concurrent use.
type Picker interface {
	// Pick returns the index i of the chosen candidate v.At(i) with the cost cost[i]. There is at least one candidate.
	// Pick sets probability[i] to the probability of each candidate. The previous value is 0.
	Pick(v *View, cost, probability []float64, rng *rand.Rand) int
}

// Policy is a way to choose. Without filters all eligible candidates remain. Without scorers all costs are 0.
type Policy struct {
	Filters []Filter
	Scorers []Scorer
	Picker  Picker

	// Sum scores the sum of Scorers in one pass. Choose uses it for requests without an explanation. nil: Choose adds the
	// scores of Scorers.
	Sum Scorer

	// Prefill returns the EffectivePrefillTokens of an [Estimate]. nil: the prompt less CachedTokens.
	Prefill func(*View, *Candidate) uint64
}

// Factory makes a policy. The configuration is valid. View.Config has the configuration of a request.
type Factory func(Config) (Policy, error)

var (
	registryLock sync.RWMutex
	registry     = map[string]Factory{}
)

// Register adds a policy that [New] finds by name. The init function of a package calls Register. Register panics if
// the name is empty or already registered.
func Register(name string, factory Factory) {
	registryLock.Lock()
	defer registryLock.Unlock()
	if name == "" || factory == nil || registry[name] != nil {
		panic(fmt.Sprintf("routing: the policy %q is registered already, or has no name or no factory", name))
	}
	registry[name] = factory
}

// Policies returns the names of all policies, sorted.
func Policies() []string {
	registryLock.RLock()
	defer registryLock.RUnlock()
	return slices.Sorted(maps.Keys(registry))
}

// Selector chooses by one policy and configuration. It is safe for concurrent use.
type Selector struct {
	name   string
	config Config
	policy Policy
	sum    []Scorer // Policy.Sum alone, if any
}

// scorers returns the scorers of a call.
func (s *Selector) scorers(explain bool) []Scorer {
	if s.sum != nil && !explain {
		return s.sum
	}
	return s.policy.Scorers
}

// New returns a selector for the policy with this name. It fails if the name is not registered, if the configuration is
// not valid, or if the policy's factory fails.
func New(name string, config Config) (*Selector, error) {
	registryLock.RLock()
	factory := registry[name]
	registryLock.RUnlock()
	if factory == nil {
		return nil, fmt.Errorf("no policy is named %q; there are %s", name, strings.Join(Policies(), ", "))
	}
	if err := config.Validate(); err != nil {
		return nil, err
	}
	if config.SharedCacheMode == "" {
		config.SharedCacheMode = SharedWouldLoad
	}
	policy, err := factory(config)
	if err != nil {
		return nil, fmt.Errorf("policy %s: %w", name, err)
	}
	if policy.Picker == nil {
		return nil, fmt.Errorf("policy %s has no picker", name)
	}
	s := &Selector{name: name, config: config, policy: policy}
	if policy.Sum != nil {
		s.sum = []Scorer{policy.Sum}
	}
	return s, nil
}

// Policy returns the name of the policy.
func (s *Selector) Policy() string { return s.name }

// Config returns the configuration.
func (s *Selector) Config() Config { return s.config }

// View has the remaining candidates of one call, for filters, scorers and pickers. It is valid until their method
// returns, for the calling goroutine.
type View struct {
	Request *Request
	Config  Config // as the request overrides it

	candidates []Candidate
	kept       []int     // indexes of the remaining ones, ascending
	why        []string  // of kept, during a filter: the reason of the drop, or ""
	drops      int       // number of reasons in why
	untiered   bool      // no candidate has a depth of a tier, so Candidate.Overlap counts
	workerless int       // index of the first candidate without a worker; -1: none
	unfit      bool      // a candidate has another role or state, so the filters for these have an effect
	penalised  bool      // a candidate has a penalty
	beyond     []uint32  // of Request.Shared: blocks in this range and those after it
	terms      []Terms   // of kept, if the request asks for an explanation and the policy has DynamoCost
	crowd      crowd     // these two are of the policy kvatlas
	outlook    outlook   // of the candidate in hand
	expected   []float64 // costs of the policy kvatlas: of each term, those of kept; nil: none yet
	scratch    *Scratch

	// prefill is of the policy; may be nil.
	prefill func(*View, *Candidate) uint64
}

// Len returns the number of remaining candidates.
func (v *View) Len() int { return len(v.kept) }

// At returns the i-th remaining candidate, in the order of the call. It must not be changed.
func (v *View) At(i int) *Candidate { return &v.candidates[v.kept[i]] }

// Index returns the index of the i-th remaining candidate among all candidates of the call.
func (v *View) Index(i int) int { return v.kept[i] }

// Drop drops the i-th candidate. Filters call it. why is a short clause about the candidate, such as "is draining". A
// constant does not allocate. A filter should make a clause with details only if v.Request.Explain is set.
func (v *View) Drop(i int, why string) {
	if v.why[i] == "" {
		v.drops++
	}
	if v.why[i] = why; why == "" {
		v.why[i] = "no reason given"
	}
}

// SharedBlocks returns the number of blocks of a shared store that count for c, by Config.SharedCacheMode.
func (v *View) SharedBlocks(c *Candidate) uint32 {
	if v.Config.SharedCacheMode != SharedDynamo {
		return c.WouldLoad
	}
	device := c.Device
	if v.untiered {
		device = uint32(roundBlocks(c.Overlap))
	}
	shared := v.Request.Shared
	i, _ := slices.BinarySearchFunc(shared, device, func(s [2]uint32, depth uint32) int {
		if s[1] <= depth {
			return -1
		}
		return 1
	})
	if i == len(shared) {
		return 0
	}
	return v.beyond[i] - (max(device, shared[i][0]) - shared[i][0])
}

// Scratch is the memory of calls of [Selector.Choose]. The zero value is ready to use.
type Scratch struct {
	view        View
	kept        []int
	why         []string
	beyond      []uint32
	cost        []float64
	score       []float64
	expected    []float64
	probability []float64
	dropped     []int // number of dropped candidates by filter, in order
	allowed     map[events.WorkerID]struct{}
}

// grown returns s with a length of n and all elements zero.
func grown[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n, n+n/4)
	}
	s = s[:n]
	clear(s)
	return s
}

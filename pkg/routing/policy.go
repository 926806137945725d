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

// Filter drops candidates. One filter serves any number of goroutines at a time.
type Filter interface {
	// Name is what explanations call it.
	Name() string

	// Filter calls v.Drop for candidates that are not to be chosen. They are in v until it returns.
	Filter(v *View)
}

// Scorer gives candidates a cost. One scorer serves any number of goroutines at a time.
type Scorer interface {
	// Name is what explanations call it.
	Name() string

	// Score sets cost[i], which is 0, for each candidate v.At(i). Costs may be negative; the sums of all scorers must be
	// finite.
	Score(v *View, cost []float64)
}

// Picker chooses among the candidates that are left. One picker serves any number of goroutines at a time.
type Picker interface {
	// Pick returns the i of the candidate v.At(i) to choose, which has cost[i]. There is at least one. It sets
	// probability[i], which is 0, to how likely each candidate was to be chosen.
	Pick(v *View, cost, probability []float64, rng *rand.Rand) int
}

// Policy is how to choose. Without filters all eligible candidates are left, without scorers all costs are 0.
type Policy struct {
	Filters []Filter
	Scorers []Scorer
	Picker  Picker

	// Prefill returns the EffectivePrefillTokens of an [Estimate]. nil: the prompt less CachedTokens.
	Prefill func(*View, *Candidate) uint64
}

// Factory makes a policy. The configuration has been validated; for a request's own use View.Config.
type Factory func(Config) (Policy, error)

var (
	registryLock sync.RWMutex
	registry     = map[string]Factory{}
)

// Register makes a policy known by name to [New]. It is for a package's init; a name that is empty or known already
// panics.
func Register(name string, factory Factory) {
	registryLock.Lock()
	defer registryLock.Unlock()
	if name == "" || factory == nil || registry[name] != nil {
		panic(fmt.Sprintf("routing: the policy %q is known already, or has no name or no factory", name))
	}
	registry[name] = factory
}

// Policies returns the names of all policies, sorted.
func Policies() []string {
	registryLock.RLock()
	defer registryLock.RUnlock()
	return slices.Sorted(maps.Keys(registry))
}

// Selector chooses by one policy and configuration. It does not change; any number of goroutines may use it.
type Selector struct {
	name   string
	config Config
	policy Policy
}

// New returns a selector by the name of its policy. It fails if nobody has registered the name, if the configuration is
// not valid, or as the policy's factory says.
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
	return &Selector{name: name, config: config, policy: policy}, nil
}

// Policy returns the name of the policy.
func (s *Selector) Policy() string { return s.name }

// Config returns the configuration.
func (s *Selector) Config() Config { return s.config }

// View is the candidates of one call that have not been dropped, as filters, scorers and pickers see them. It is good
// until their method returns, for the goroutine that called it.
type View struct {
	Request *Request
	Config  Config // as the request overrides it

	candidates []Candidate
	kept       []int     // indexes of those that are left, ascending
	why        []string  // of kept, during a filter: why it is dropped, or ""
	drops      int       // how many of why are not ""
	untiered   bool      // no candidate has a tier's depth: Candidate.Overlap counts
	beyond     []uint32  // of Request.Shared: blocks in this range and those after it
	terms      []Terms   // of kept, if the request asks for an explanation and the policy has DynamoCost
	crowd      crowd     // these two are of the policy kvatlas
	outlook    outlook   // of the candidate in hand
	expected   []float64 // costs of the policy kvatlas: of each term, those of kept; nil: none yet
	scratch    *Scratch

	// prefill is of the policy; may be nil.
	prefill func(*View, *Candidate) uint64
}

// Len returns how many candidates are left.
func (v *View) Len() int { return len(v.kept) }

// At returns the i-th candidate that is left, in the order of the call. It must not be changed.
func (v *View) At(i int) *Candidate { return &v.candidates[v.kept[i]] }

// Index returns the place of the i-th candidate that is left among all candidates of the call.
func (v *View) Index(i int) int { return v.kept[i] }

// Drop drops the i-th candidate; why is a short clause for people about the candidate ("is draining"). A constant
// costs nothing; a clause with details is worth its allocation only if v.Request.Explain. It is for filters.
func (v *View) Drop(i int, why string) {
	if v.why[i] == "" {
		v.drops++
	}
	if v.why[i] = why; why == "" {
		v.why[i] = "no reason given"
	}
}

// SharedBlocks returns how many blocks of a shared store count for c, by Config.SharedCacheMode.
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
	dropped     []int // how many each filter has dropped, in order
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

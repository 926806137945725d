package routesim

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Arm is the name of a way to choose workers.
type Arm string

// The arms. DESIGN.md describes them.
const (
	ArmRandom        Arm = "random"
	ArmRoundRobin    Arm = "round-robin"
	ArmLeastLoad     Arm = "least-load"     // blocks and prefill tokens under way
	ArmLeastRequests Arm = "least-requests" // running requests, then prompt tokens of running requests
	ArmPowerOfTwo    Arm = "power-of-two"   // the worker with fewer requests of two random workers

	ArmSticky      Arm = "sticky"       // the same worker for a session id
	ArmStickyHead  Arm = "sticky-head"  // the same worker for a head of the prompt
	ArmBoundedHash Arm = "bounded-hash" // consistent hashing of the session id with bounded loads

	ArmCacheAware     Arm = "cache-aware"          // of the routers of SGLang and vLLM
	ArmVLLMHash       Arm = "vllm-consistent-hash" // of vLLM's router
	ArmVLLMPowerOfTwo Arm = "vllm-power-of-two"    // of vLLM's router
	ArmLLMD           Arm = "llm-d"                // prefix, queue and KV cache scorers; guessed prefixes
	ArmLLMDPrecise    Arm = "llm-d-precise"        // the same with prefixes from events

	// Every router guesses blocks from its own requests: for 120 seconds, or within the capacity of the worker's memory.
	// It counts only its own running requests.
	ArmApproxTTL Arm = "approx-ttl"
	ArmApproxLRU Arm = "approx-lru"

	// Every router has an index from the engines' events, and counts only its own running requests. With ArmExactRestart
	// all routers restart with empty state after half of the requests.
	ArmExactOwn     Arm = "exact-own"
	ArmExactRestart Arm = "exact-restart"

	// All routers share an index and the running requests. A restart of a router loses no state.
	ArmExactShared Arm = "exact-shared"

	// ArmKVAtlas is the default policy of indexer serve with the knowledge of ArmExactShared.
	ArmKVAtlas Arm = "policy:kvatlas"

	// ArmPromptSessions is the policy kvatlas with session affinity by prompt (internal/choose/affinity): a request
	// follows the session with a last prompt that the request continues.
	ArmPromptSessions Arm = "prompt-sessions"

	ArmOracle       Arm = "oracle"        // the policy dynamo with the true state of the engines
	ArmOracleGreedy Arm = "oracle-greedy" // the least true TTFT of the current request
)

// Arms are the default arms of a comparison, in the order of their knowledge.
var Arms = []Arm{ArmRandom, ArmRoundRobin, ArmLeastLoad, ArmApproxTTL, ArmApproxLRU, ArmExactRestart, ArmExactOwn,
	ArmExactShared, ArmKVAtlas, ArmOracle}

// Rivals are the arms of other routers, with the oracle last.
var Rivals = []Arm{ArmRandom, ArmRoundRobin, ArmLeastRequests, ArmPowerOfTwo, ArmSticky, ArmStickyHead, ArmBoundedHash,
	ArmCacheAware, ArmVLLMHash, ArmVLLMPowerOfTwo, ArmLLMD, ArmLLMDPrecise, "dynamo-1-1", "dynamo-4-4",
	ArmOracleGreedy}

// knowledge is the knowledge of an arm's routers about caches.
type knowledge int

const (
	knowsNothing knowledge = iota
	knowsTables            // guesses of every router
	knowsIndex             // events
	knowsTruth
)

// way is the behaviour of an arm.
type way struct {
	policy string // of pkg/routing; "": rule
	rule   func(*fleet) rule
	knows  knowledge
	shares bool // whether all routers share the running requests, and the caches if knowsIndex
	tune   func(*routing.Config)
	follow bool // whether sessions are recognised by prompts and stay on their workers; for policies with shared state

	// fill sets further fields of a policy's candidate from the state of the worker. nil disables the call.
	fill func(*routing.Candidate, Facts)
}

// books reports whether routers store the blocks of running requests.
func (w way) books() bool {
	return w.policy != "" && (w.knows == knowsNothing && w.shares || w.knows == knowsTables || w.knows == knowsIndex)
}

// rule chooses a worker without a policy of pkg/routing. Every router has a rule, unless the routers share a rule.
type rule interface {
	// choose returns a live worker. live is in ascending order.
	choose(router *router, r *request, live []int, now micros) int

	// left is called after a worker has lost its memory.
	left(worker int)
}

var ways = map[Arm]way{
	ArmRandom:         {policy: "random"},
	ArmRoundRobin:     {policy: "round_robin"},
	ArmLeastLoad:      {policy: "least_load", shares: true},
	ArmLeastRequests:  {rule: newLeastRequests, shares: true},
	ArmPowerOfTwo:     {rule: newPowerOfTwo},
	ArmSticky:         {rule: newSticky, shares: true},
	ArmStickyHead:     {rule: newStickyHead, shares: true},
	ArmBoundedHash:    {rule: newBoundedHash},
	ArmCacheAware:     {rule: newCacheAware},
	ArmVLLMHash:       {rule: newRing, shares: true},
	ArmVLLMPowerOfTwo: {rule: newPolledPowerOfTwo},
	ArmLLMD:           {rule: newLLMD},
	ArmLLMDPrecise:    {rule: newLLMD, knows: knowsIndex},
	ArmApproxTTL:      {policy: "dynamo", knows: knowsTables},
	ArmApproxLRU:      {policy: "dynamo", knows: knowsTables},
	ArmExactOwn:       {policy: "dynamo", knows: knowsIndex},
	ArmExactRestart:   {policy: "dynamo", knows: knowsIndex},
	ArmExactShared:    {policy: "dynamo", knows: knowsIndex, shares: true},
	ArmPromptSessions: {policy: "kvatlas", knows: knowsIndex, shares: true, follow: true},
	ArmOracle:         {policy: "dynamo", knows: knowsTruth, shares: true},
	ArmOracleGreedy:   {rule: newGreedy, knows: knowsTruth, shares: true},
}

// way returns the behaviour of an arm. Further arms are dynamo-SCALE-CREDIT, which is [ArmExactShared] with the given
// weights, policy:NAME, which is [ArmExactShared] with another policy of pkg/routing, and own:NAME, which is
// [ArmExactOwn] with another policy.
func (a Arm) way() (way, error) {
	if w, ok := ways[a]; ok {
		return w, nil
	}
	w := ways[ArmExactShared]
	if name, ok := strings.CutPrefix(string(a), "policy:"); ok && slices.Contains(routing.Policies(), name) {
		w.policy = name
		return w, nil
	}
	if name, ok := strings.CutPrefix(string(a), "own:"); ok && slices.Contains(routing.Policies(), name) {
		w.policy, w.shares = name, false
		return w, nil
	}
	if weights, ok := strings.CutPrefix(string(a), "dynamo-"); ok {
		s, c, _ := strings.Cut(weights, "-")
		scale, err1 := strconv.ParseFloat(s, 64)
		credit, err2 := strconv.ParseFloat(c, 64)
		if err1 == nil && err2 == nil && scale >= 0 && credit >= 0 {
			w.tune = func(cfg *routing.Config) { cfg.PrefillLoadScale, cfg.OverlapScoreCredit = scale, credit }
			return w, nil
		}
	}
	return way{}, fmt.Errorf("there is no arm %q; there are %v, dynamo-SCALE-CREDIT, and policy:NAME and own:NAME for the policies %v",
		a, AllArms(), routing.Policies())
}

// AllArms returns the names of all arms, sorted.
func AllArms() []Arm {
	var list []Arm
	for a := range ways {
		list = append(list, a)
	}
	slices.Sort(list)
	return list
}

// ParseArms reads names of arms. "rivals" stands for [Rivals].
func ParseArms(names []string) (arms []Arm, err error) {
	for _, n := range names {
		list := []Arm{Arm(strings.TrimSpace(n))}
		if list[0] == "rivals" {
			list = Rivals
		}
		for _, a := range list {
			if _, err := a.way(); err != nil {
				return nil, err
			}
			if !slices.Contains(arms, a) {
				arms = append(arms, a)
			}
		}
	}
	return arms, nil
}

// Scales reports whether the number of routers makes a difference.
func (a Arm) Scales() bool {
	w, err := a.way()
	return err == nil && (w.knows == knowsTables || w.knows == knowsIndex || w.rule != nil && !w.shares)
}

// UsesSessions reports whether an arm chooses by session ids. Requests without one go by the head of their prompt.
func UsesSessions(a Arm) bool {
	return a == ArmSticky || a == ArmBoundedHash || a == ArmVLLMHash
}

func (a Arm) tables() bool { return a == ArmApproxTTL || a == ArmApproxLRU }

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

// The arms. DESIGN.md describes each of them.
const (
	ArmRandom        Arm = "random"
	ArmRoundRobin    Arm = "round-robin"
	ArmLeastLoad     Arm = "least-load"     // blocks and prefill tokens under way
	ArmLeastRequests Arm = "least-requests" // requests under way, then their prompt tokens
	ArmPowerOfTwo    Arm = "power-of-two"   // the worker with fewer requests of two random ones

	ArmSticky      Arm = "sticky"       // one worker per session id
	ArmStickyHead  Arm = "sticky-head"  // one worker per head of the prompt
	ArmBoundedHash Arm = "bounded-hash" // consistent hashing of the session id with bounded loads

	ArmCacheAware     Arm = "cache-aware"          // of the routers of SGLang and vLLM
	ArmVLLMHash       Arm = "vllm-consistent-hash" // of vLLM's router
	ArmVLLMPowerOfTwo Arm = "vllm-power-of-two"    // of vLLM's router
	ArmLLMD           Arm = "llm-d"                // prefix, queue and KV cache scorers; guessed prefixes
	ArmLLMDPrecise    Arm = "llm-d-precise"        // the same with prefixes from events

	// Each router guesses blocks from what it sent where: for 120 seconds, or as much as the worker's memory has room
	// for. It counts only its own requests under way.
	ArmApproxTTL Arm = "approx-ttl"
	ArmApproxLRU Arm = "approx-lru"

	// Each router has an index from the engines' events, and counts only its own requests under way. With
	// ArmExactRestart all routers are restarted, and so empty, after half the requests.
	ArmExactOwn     Arm = "exact-own"
	ArmExactRestart Arm = "exact-restart"

	// All routers share one index and the requests under way. A restart of a router loses neither.
	ArmExactShared Arm = "exact-shared"

	// ArmPromptSessions is the policy kvatlas with session affinity by prompt (internal/choose/affinity): a request goes
	// where the session is whose last prompt its own continues.
	ArmPromptSessions Arm = "prompt-sessions"

	ArmOracle       Arm = "oracle"        // the policy dynamo with the true state of the engines
	ArmOracleGreedy Arm = "oracle-greedy" // the least true TTFT of this request
)

// Arms are the arms that a comparison has without a choice of its own, in the order of what they know.
var Arms = []Arm{ArmRandom, ArmRoundRobin, ArmLeastLoad, ArmApproxTTL, ArmApproxLRU, ArmExactRestart, ArmExactOwn,
	ArmExactShared, ArmOracle}

// Rivals are the arms of other routers, with the oracle last.
var Rivals = []Arm{ArmRandom, ArmRoundRobin, ArmLeastRequests, ArmPowerOfTwo, ArmSticky, ArmStickyHead, ArmBoundedHash,
	ArmCacheAware, ArmVLLMHash, ArmVLLMPowerOfTwo, ArmLLMD, ArmLLMDPrecise, "dynamo-1-1", "dynamo-4-4",
	ArmOracleGreedy}

// knowledge is what an arm's routers know of caches.
type knowledge int

const (
	knowsNothing knowledge = iota
	knowsTables            // guesses of each router
	knowsIndex             // events
	knowsTruth
)

// way is what an arm does.
type way struct {
	policy string // of pkg/routing; "": rule
	rule   func(*fleet) rule
	knows  knowledge
	shares bool // all routers have one view of the requests under way, and of caches if knowsIndex
	tune   func(*routing.Config)
	follow bool // sessions are recognised by prompts and stay on their workers; of a policy whose routers share a view

	// fill sets further fields of a policy's candidate from the state of its worker; nil: there are none.
	fill func(*routing.Candidate, Facts)
}

// books reports whether routers keep which blocks requests under way have.
func (w way) books() bool {
	return w.policy != "" && (w.knows == knowsNothing && w.shares || w.knows == knowsTables || w.knows == knowsIndex)
}

// rule chooses a worker without a policy of pkg/routing. Each router has one of its own, unless they share.
type rule interface {
	// choose returns one of the live workers, which are in ascending order.
	choose(router *router, r *request, live []int, now micros) int

	// left is called when a worker has lost its memory.
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

// way returns what an arm does. Besides the constants there are dynamo-SCALE-CREDIT, which is [ArmExactShared] with
// these weights, and policy:NAME, which is [ArmExactShared] with another policy of pkg/routing.
func (a Arm) way() (way, error) {
	if w, ok := ways[a]; ok {
		return w, nil
	}
	w := ways[ArmExactShared]
	if name, ok := strings.CutPrefix(string(a), "policy:"); ok && slices.Contains(routing.Policies(), name) {
		w.policy = name
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
	return way{}, fmt.Errorf("there is no arm %q; there are %v, dynamo-SCALE-CREDIT, and policy:NAME for the policies %v",
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

// scales reports whether the number of routers makes a difference.
func (a Arm) scales() bool {
	w, err := a.way()
	return err == nil && (w.knows == knowsTables || w.knows == knowsIndex || w.rule != nil && !w.shares)
}

func (a Arm) tables() bool { return a == ArmApproxTTL || a == ArmApproxLRU }

package routing

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// filterFunc makes a filter from a function.
type filterFunc struct {
	name   string
	filter func(*View)
}

func (f *filterFunc) Name() string   { return f.name }
func (f *filterFunc) Filter(v *View) { f.filter(v) }

// eligibility has the filters that run before the filters of a policy. The pin is first, so the LoRA filter sees the
// pinned worker only and keeps this worker. A refusal by overload means that all earlier filters have passed. Penalty
// is last, so it keeps all candidates if only penalised ones remain.
var eligibility = []Filter{
	pinned,
	&filterFunc{"allowed_worker_ids", filterAllowed},
	&filterFunc{"excluded_workers", filterExcluded},
	&filterFunc{"endpoints", filterEndpoints},
	&filterFunc{"role", filterRole},
	&filterFunc{"state", filterState},
	&filterFunc{"lora", filterLoRA},
	&filterFunc{"required_taints", filterTaints},
	&filterFunc{"near", filterNear},
	overload,
	&filterFunc{"penalty", filterPenalty},
}

// filterPenalty drops penalised candidates if others remain.
func filterPenalty(v *View) {
	if !v.penalised {
		return
	}
	penalised := 0
	for i := range v.Len() {
		if v.At(i).Penalty != nil {
			penalised++
		}
	}
	if penalised == 0 || penalised == v.Len() {
		return
	}
	for i := range v.Len() {
		p := v.At(i).Penalty
		if p == nil {
			continue
		}
		why := "is penalised for failed requests"
		if v.Request.Explain {
			why = fmt.Sprintf("is penalised for another %.1f s: %d failed requests since its last success, the last one: %s",
				p.LeftS, p.Failures, p.Reason)
		}
		v.Drop(i, why)
	}
}

func filterExcluded(v *View) {
	if len(v.Request.Excluded) == 0 {
		return
	}
	for i := range v.Len() {
		if slices.Contains(v.Request.Excluded, v.At(i).Worker.ID) {
			v.Drop(i, "is excluded by the request")
		}
	}
}

// filterNear keeps candidates that have one of the taints.
func filterNear(v *View) {
	near := v.Request.Near
	if near == nil {
		return
	}
	for i := range v.Len() {
		if !slices.ContainsFunc(v.At(i).Worker.Taints, func(t string) bool { return slices.Contains(near, t) }) {
			v.Drop(i, "has no prefill worker near that may be chosen")
		}
	}
}

var pinned Filter = &filterFunc{"pinned_worker", filterPin}

var overload Filter = &filterFunc{"overload", filterOverload}

// Affinity returns the filter affinity_target. If the request's affinity target remains, the filter drops all other
// candidates. All policies of this package have the filter.
func Affinity() Filter { return affinity }

var affinity Filter = &filterFunc{"affinity_target", filterAffinity}

func filterPin(v *View) {
	if pin := v.Request.Pin; pin != nil {
		dropOthers(v, pin, "is not the pinned one")
	}
}

func filterAffinity(v *View) {
	target := v.Request.Affinity
	if target == nil {
		return
	}
	for i := range v.Len() {
		if target.is(v.At(i)) {
			dropOthers(v, target, "is not the affinity target")
			return
		}
	}
}

func dropOthers(v *View, target *Target, why string) {
	for i := range v.Len() {
		if !target.is(v.At(i)) {
			v.Drop(i, why)
		}
	}
}

func filterAllowed(v *View) {
	allowed := v.Request.Allowed
	if allowed == nil {
		return
	}
	set := v.scratch.allowed
	if set == nil {
		set = map[events.WorkerID]struct{}{}
		v.scratch.allowed = set
	}
	clear(set)
	for _, id := range allowed {
		set[id] = struct{}{}
	}
	for i := range v.Len() {
		if _, ok := set[v.At(i).Worker.ID]; !ok {
			v.Drop(i, "is not allowed")
		}
	}
}

func filterEndpoints(v *View) {
	if v.Request.Endpoints == nil {
		return
	}
	set := make(map[string]struct{}, len(v.Request.Endpoints))
	for _, e := range v.Request.Endpoints {
		set[e] = struct{}{}
	}
	for i := range v.Len() {
		if _, ok := set[v.At(i).Worker.Endpoint]; !ok {
			v.Drop(i, "is at none of the endpoints")
		}
	}
}

func filterRole(v *View) {
	if !v.unfit {
		return
	}
	role := v.Request.Role
	for i := range v.Len() {
		of := v.At(i).Worker.Role
		if of.In(role) {
			continue
		}
		why := "is in another pool"
		if v.Request.Explain {
			why += ", " + string(cmp.Or(of, Aggregated))
		}
		v.Drop(i, why)
	}
}

func filterState(v *View) {
	if !v.unfit {
		return
	}
	for i := range v.Len() {
		w := v.At(i).Worker
		if !w.unschedulable() {
			continue
		}
		why := "is not schedulable"
		if v.Request.Explain {
			if why = "is " + string(w.State); len(w.Reasons) > 0 {
				why += ": " + strings.Join(w.Reasons, "; ")
			}
		}
		v.Drop(i, why)
	}
}

// AnyLoRA in [Worker].LoRAs means that the worker loads any adapter on request.
const AnyLoRA = "*"

// filterLoRA keeps candidates with the adapter. If no candidate has the adapter, candidates that may load it remain:
// those with AnyLoRA or without a list. A pinned worker stays.
func filterLoRA(v *View) {
	lora := v.Request.LoRA
	if lora == "" || v.Request.Pin != nil {
		return
	}
	has := func(i int) bool { return slices.Contains(v.At(i).Worker.LoRAs, lora) }
	loads := func(i int) bool {
		return v.At(i).Worker.LoRAs == nil || slices.Contains(v.At(i).Worker.LoRAs, AnyLoRA)
	}
	fits, why := loads, "neither has the adapter nor loads adapters on request"
	for i := range v.Len() {
		if has(i) {
			fits, why = has, "does not have the adapter, which others have"
			break
		}
	}
	for i := range v.Len() {
		if !fits(i) {
			v.Drop(i, why)
		}
	}
}

func filterTaints(v *View) {
	for _, taint := range v.Request.RequiredTaints {
		for i := range v.Len() {
			if slices.Contains(v.At(i).Worker.Taints, taint) {
				continue
			}
			why := "lacks a required taint"
			if v.Request.Explain {
				why = fmt.Sprintf("lacks the required taint %q", taint)
			}
			v.Drop(i, why)
		}
	}
}

func filterOverload(v *View) {
	blocks, tokens := v.Config.ActiveDecodeBlocksThreshold, v.Config.ActivePrefillTokensThreshold
	frac := v.Config.ActivePrefillTokensThresholdFrac
	if blocks == nil && tokens == nil && frac == nil {
		return
	}
	for i := range v.Len() {
		c := v.At(i)
		drop := func(name string, is, reported uint64, bound float64) {
			why := "is overloaded"
			if v.Request.Explain {
				if is == reported {
					name += ", as it reports,"
				}
				why = fmt.Sprintf("is overloaded: %s is %d, above %.4g", name, is, bound)
			}
			v.Drop(i, why)
		}
		used, prefill := uint64(0), c.UsedPrefillTokens
		if c.HasUsed {
			used = c.UsedBlocks
		}
		reported := used
		if c.HasLoad {
			used, prefill = max(used, c.ActiveBlocks), max(prefill, c.ActivePrefillTokens)
		}
		capacity := c.capacity()
		if blocks != nil && capacity > 0 && float64(used) > *blocks*float64(capacity) {
			drop("used blocks", used, reported, *blocks*float64(capacity))
			continue
		}
		if tokens != nil && float64(prefill) > *tokens {
			drop("active_prefill_tokens", prefill, c.UsedPrefillTokens, *tokens)
			continue
		}
		if frac != nil {
			if bound := *frac * float64(c.Worker.PrefillCapacity()); float64(prefill) > bound {
				drop("active_prefill_tokens", prefill, c.UsedPrefillTokens, bound)
			}
		}
	}
}

// capacity returns the number of blocks of the rank's device memory; 0: not known.
func (c *Candidate) capacity() uint64 {
	if c.Worker.TotalKVBlocks > 0 {
		return c.Worker.TotalKVBlocks
	}
	return c.UsedOf
}

package routing

import (
	"errors"
	"fmt"
)

// BypassMode is the condition for a decode worker to compute a prompt without a prefill worker.
type BypassMode string

// The modes.
const (
	BypassNever       BypassMode = "" // every request has a prefill worker
	BypassISLBounding BypassMode = "isl_bounding"
	BypassPrefillLoad BypassMode = "prefill_load"
	BypassISLOrLoad   BypassMode = "isl_or_load"
)

// KVTransfer is the required nearness of a prefill worker to the decode worker that receives its blocks.
type KVTransfer string

// The kinds of nearness.
const (
	KVTransferRequired  KVTransfer = "required"
	KVTransferPreferred KVTransfer = "preferred"
)

// Disaggregation has the rules for a decode worker and a prefill worker of one request. The names and the defaults of
// the bounds are Dynamo's where Dynamo has the rule.
type Disaggregation struct {
	// Bypass is the condition for the decode worker to compute the prompt. isl_bounding: the missing part is short.
	// prefill_load: the best prefill worker is busy. isl_or_load: either condition is enough. Default: never.
	Bypass BypassMode `json:"bypass,omitempty" msgpack:"bypass,omitempty"`

	// A part is short if it has fewer tokens than ISLTokens, and fewer than the share ISLRatio of the prompt. Defaults
	// 2,048 and 0.7; finite and at least 0.
	ISLTokens *float64 `json:"isl_tokens,omitempty" msgpack:"isl_tokens,omitempty"`
	ISLRatio  *float64 `json:"isl_ratio,omitempty" msgpack:"isl_ratio,omitempty"`

	// PrefillBusyThreshold is a multiple of MaxNumBatchedTokens (10,000,000 if unknown). A prefill worker with more
	// prefill under way is busy. The modes prefill_load and isl_or_load need the threshold. Finite and at least 0.
	PrefillBusyThreshold *float64 `json:"prefill_busy_threshold,omitempty" msgpack:"prefill_busy_threshold,omitempty"`

	// DecodeBusyThreshold is a share of the capacity. A decode worker that would have more blocks is busy and computes
	// no prompts. Default: never busy; finite and at least 0.
	DecodeBusyThreshold *float64 `json:"decode_busy_threshold,omitempty" msgpack:"decode_busy_threshold,omitempty"`

	// KVTransferDomain is a domain of the workers' topology. Prefill workers with the decode worker's value there are
	// near: required, or preferred by a weight as of Request.PreferredTaints (default 1). Default: all are near.
	KVTransferDomain          string     `json:"kv_transfer_domain,omitempty" msgpack:"kv_transfer_domain,omitempty"`
	KVTransferEnforcement     KVTransfer `json:"kv_transfer_enforcement,omitempty" msgpack:"kv_transfer_enforcement,omitempty"` // default preferred
	KVTransferPreferredWeight *float64   `json:"kv_transfer_preferred_weight,omitempty" msgpack:"kv_transfer_preferred_weight,omitempty"`
}

// validate returns all errors of d, which may be nil.
func (d *Disaggregation) validate() error {
	if d == nil {
		return nil
	}
	const of = "disaggregation."
	var x complaints
	switch d.Bypass {
	case BypassNever, BypassISLBounding:
	case BypassPrefillLoad, BypassISLOrLoad:
		if d.PrefillBusyThreshold == nil {
			x.add("%sbypass is %s: it needs %[1]sprefill_busy_threshold", of, d.Bypass)
		}
	default:
		x.add("%sbypass is %q: it must be %q, %q or %q", of, d.Bypass, BypassISLBounding, BypassPrefillLoad,
			BypassISLOrLoad)
	}
	x.least0(of+"isl_tokens", d.ISLTokens)
	x.least0(of+"isl_ratio", d.ISLRatio)
	x.least0(of+"prefill_busy_threshold", d.PrefillBusyThreshold)
	x.least0(of+"decode_busy_threshold", d.DecodeBusyThreshold)
	x.least0(of+"kv_transfer_preferred_weight", d.KVTransferPreferredWeight)
	switch d.KVTransferEnforcement {
	case "", KVTransferRequired, KVTransferPreferred:
	default:
		x.add("%skv_transfer_enforcement is %q: it must be %q or %q", of, d.KVTransferEnforcement, KVTransferRequired,
			KVTransferPreferred)
	}
	if d.KVTransferDomain == "" && (d.KVTransferEnforcement != "" || d.KVTransferPreferredWeight != nil) {
		x.add("%skv_transfer_domain is missing: it names the domain of topology_domains that counts", of)
	}
	return errors.Join(x...)
}

// TopologyTaint is the taint that a worker has because of its topology.
func TopologyTaint(domain, value string) string { return topologyTaint(domain) + value }

func topologyTaint(domain string) string { return "dynamo.topology/" + domain + "=" }

// Near returns the taint of c's worker that marks near workers; "" if there is none.
func (d *Disaggregation) Near(c *Candidate) string {
	if d == nil || d.KVTransferDomain == "" {
		return ""
	}
	return c.Worker.taintWith(topologyTaint(d.KVTransferDomain))
}

// NearRequired reports whether a prefill worker must be near.
func (d *Disaggregation) NearRequired() bool {
	return d != nil && d.KVTransferEnforcement == KVTransferRequired
}

// NearWeight returns the weight of the preference for a near prefill worker.
func (d *Disaggregation) NearWeight() float32 {
	if d.KVTransferPreferredWeight != nil {
		return float32(*d.KVTransferPreferredWeight)
	}
	return 1
}

// DecodeBusy reports whether a decode worker would have too many blocks to compute prompts.
func (d *Disaggregation) DecodeBusy(w *Worker, potentialBlocks uint64) bool {
	return d != nil && d.DecodeBusyThreshold != nil && w.TotalKVBlocks > 0 &&
		float64(potentialBlocks) > *d.DecodeBusyThreshold*float64(w.TotalKVBlocks)
}

// PrefillBusy reports whether a prefill worker has too much prefill under way.
func (d *Disaggregation) PrefillBusy(w *Worker, activePrefillTokens uint64) bool {
	return d != nil && d.PrefillBusyThreshold != nil &&
		float64(activePrefillTokens) > *d.PrefillBusyThreshold*float64(w.PrefillCapacity())
}

// Short reports whether net missing tokens of a prompt of isl tokens are few enough for the decode worker.
func (d *Disaggregation) Short(net, isl uint64) bool {
	if d == nil || d.Bypass != BypassISLBounding && d.Bypass != BypassISLOrLoad {
		return false
	}
	tokens, ratio := d.shortBounds()
	return float64(net) < tokens && float64(net)/float64(max(isl, 1)) < ratio
}

func (d *Disaggregation) shortBounds() (tokens, ratio float64) {
	tokens, ratio = 2048, 0.7
	set(&tokens, d.ISLTokens)
	set(&ratio, d.ISLRatio)
	return tokens, ratio
}

// ByLoad reports whether a busy prefill worker is bypassed.
func (d *Disaggregation) ByLoad() bool {
	return d != nil && (d.Bypass == BypassPrefillLoad || d.Bypass == BypassISLOrLoad)
}

// WhyShort returns the reason for the result of Short.
func (d *Disaggregation) WhyShort(net, isl uint64) string {
	tokens, ratio := d.shortBounds()
	is := "is not both"
	if d.Short(net, isl) {
		is = "is"
	}
	return fmt.Sprintf("the decode worker lacks %d of %d tokens, which %s fewer than %v and than %v of the prompt", net,
		isl, is, tokens, ratio)
}

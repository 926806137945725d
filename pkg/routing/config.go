package routing

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
)

// SharedMode selects the blocks of a shared store that count for a candidate.
type SharedMode string

// The modes.
const (
	// SharedWouldLoad counts the blocks directly after the candidate's own blocks that the engine would load from the
	// store by the engine's rules: Candidate.WouldLoad.
	SharedWouldLoad SharedMode = "would_load"

	// SharedDynamo counts all blocks of the store at or beyond the candidate's device depth, as Dynamo does. Blocks
	// behind holes count, and so do blocks with a copy in the host memory or on the disk: Request.Shared.
	SharedDynamo SharedMode = "dynamo"
)

// Config has the constants of the policies. Names on the wire, defaults and ranges are Dynamo's where Dynamo has the
// constant. Start from [DefaultConfig]: in the zero value, which is valid, all weights are 0.
type Config struct {
	// OverlapScoreCredit is the worth of a block of the prompt in device memory, in blocks of prefill. Default 1; finite
	// and at least 0, may be above 1.
	OverlapScoreCredit float64 `json:"overlap_score_credit" msgpack:"overlap_score_credit"`

	// OverlapScoreCreditDecay lets the credit fall on candidates that have more prefill to do than the least loaded one.
	// Default 0, no decay; finite and at least 0.
	OverlapScoreCreditDecay float64 `json:"overlap_score_credit_decay" msgpack:"overlap_score_credit_decay"`

	// PrefillLoadScale is the weight of prefill against decode. Default 1; finite and at least 0.
	PrefillLoadScale float64 `json:"prefill_load_scale" msgpack:"prefill_load_scale"`

	// DecodeActiveRequestWeight is the cost of each request under way, in blocks. Default 0; finite and at least 0.
	DecodeActiveRequestWeight float64 `json:"decode_active_request_weight" msgpack:"decode_active_request_weight"`

	// HostCacheHitWeight and DiskCacheHitWeight are the worth of a block in host memory, and on disk or in an external
	// store. Defaults 0.75 and 0.25; from 0 to 1.
	HostCacheHitWeight float64 `json:"host_cache_hit_weight" msgpack:"host_cache_hit_weight"`
	DiskCacheHitWeight float64 `json:"disk_cache_hit_weight" msgpack:"disk_cache_hit_weight"`

	// RouterTemperature is 0 for the smallest cost, and else spreads requests over candidates of like cost. Default 0;
	// finite and at least 0.
	RouterTemperature float64 `json:"router_temperature" msgpack:"router_temperature"`

	// SharedCacheMultiplier is the worth of a block in a shared store. Default 0.5; from 0 to 1. Without a shared store
	// no block counts.
	SharedCacheMultiplier float64 `json:"shared_cache_multiplier" msgpack:"shared_cache_multiplier"`

	// SharedCacheMode selects the counted blocks of a shared store. Default would_load.
	SharedCacheMode SharedMode `json:"shared_cache_mode" msgpack:"shared_cache_mode"`

	// RouterAssumeKVReuse: requests with equal prefixes share blocks on a worker. Default true. The caller reads the
	// field for bookings and Candidate.NewBlocks. No cost reads the field.
	RouterAssumeKVReuse bool `json:"router_assume_kv_reuse" msgpack:"router_assume_kv_reuse"`

	// RouterTrackPrefillTokens: prefill counts as load. Default true.
	RouterTrackPrefillTokens bool `json:"router_track_prefill_tokens" msgpack:"router_track_prefill_tokens"`

	// ActiveDecodeBlocksThreshold is the share of the capacity above which a candidate is overloaded. The compared number
	// is the greater one of the used blocks in the engine's report and the blocks of requests under way. From 0 to 1.
	// Default nil: never.
	ActiveDecodeBlocksThreshold *float64 `json:"active_decode_blocks_threshold,omitempty" msgpack:"active_decode_blocks_threshold,omitempty"`

	// ActivePrefillTokensThreshold is the number of tokens of prefill under way above which a candidate is overloaded.
	// Default nil, never; finite and at least 0.
	ActivePrefillTokensThreshold *float64 `json:"active_prefill_tokens_threshold,omitempty" msgpack:"active_prefill_tokens_threshold,omitempty"`

	// ActivePrefillTokensThresholdFrac is the same bound as a multiple of the worker's MaxNumBatchedTokens (10,000,000
	// if unknown). Default nil, never; finite and at least 0.
	ActivePrefillTokensThresholdFrac *float64 `json:"active_prefill_tokens_threshold_frac,omitempty" msgpack:"active_prefill_tokens_threshold_frac,omitempty"`

	// Disaggregation has the rules for a decode and a prefill worker of one request; the caller applies them. Default
	// nil: always both, at any place.
	Disaggregation *Disaggregation `json:"disaggregation,omitempty" msgpack:"disaggregation,omitempty"`

	// SessionAffinity has the rules for sessions; the caller applies them. Default nil: no session affinity.
	SessionAffinity *SessionAffinity `json:"session_affinity,omitempty" msgpack:"session_affinity,omitempty"`

	// Queue has the rules for waiting requests; the caller applies them. Default nil: no request waits.
	Queue *Queue `json:"queue,omitempty" msgpack:"queue,omitempty"`
}

// DefaultConfig returns the defaults.
func DefaultConfig() Config {
	return Config{
		OverlapScoreCredit: 1, PrefillLoadScale: 1, HostCacheHitWeight: 0.75, DiskCacheHitWeight: 0.25,
		SharedCacheMultiplier: 0.5, SharedCacheMode: SharedWouldLoad,
		RouterAssumeKVReuse: true, RouterTrackPrefillTokens: true,
	}
}

// Validate returns all errors of c, each with the field's name on the wire.
func (c *Config) Validate() error {
	var x complaints
	x.least0("overlap_score_credit", &c.OverlapScoreCredit)
	x.least0("overlap_score_credit_decay", &c.OverlapScoreCreditDecay)
	x.least0("prefill_load_scale", &c.PrefillLoadScale)
	x.least0("decode_active_request_weight", &c.DecodeActiveRequestWeight)
	x.share("host_cache_hit_weight", &c.HostCacheHitWeight)
	x.share("disk_cache_hit_weight", &c.DiskCacheHitWeight)
	x.least0("router_temperature", &c.RouterTemperature)
	x.share("shared_cache_multiplier", &c.SharedCacheMultiplier)
	if m := c.SharedCacheMode; m != "" && m != SharedWouldLoad && m != SharedDynamo {
		x.add("shared_cache_mode is %q: it must be %q or %q", m, SharedWouldLoad, SharedDynamo)
	}
	x.share("active_decode_blocks_threshold", c.ActiveDecodeBlocksThreshold)
	x.least0("active_prefill_tokens_threshold", c.ActivePrefillTokensThreshold)
	x.least0("active_prefill_tokens_threshold_frac", c.ActivePrefillTokensThresholdFrac)
	x = append(x, c.Disaggregation.validate(), c.SessionAffinity.validate(), c.Queue.validate())
	return errors.Join(x...)
}

// Overrides replace fields of the configuration for one request; nil: not replaced. Dynamo's service checks all of them
// and then uses only the two booleans. Here all count.
type Overrides struct {
	OverlapScoreCredit *float64 `json:"overlap_score_credit,omitempty" msgpack:"overlap_score_credit,omitempty"`
	PrefillLoadScale   *float64 `json:"prefill_load_scale,omitempty" msgpack:"prefill_load_scale,omitempty"`

	// OverlapScoreWeight is the older name of PrefillLoadScale and overrides it. 0 sets OverlapScoreCredit to 0 too.
	OverlapScoreWeight *float64 `json:"overlap_score_weight,omitempty" msgpack:"overlap_score_weight,omitempty"`

	RouterTemperature     *float64 `json:"router_temperature,omitempty" msgpack:"router_temperature,omitempty"`
	AssumeKVReuse         *bool    `json:"assume_kv_reuse,omitempty" msgpack:"assume_kv_reuse,omitempty"`
	TrackPrefillTokens    *bool    `json:"track_prefill_tokens,omitempty" msgpack:"track_prefill_tokens,omitempty"`
	SharedCacheMultiplier *float64 `json:"shared_cache_multiplier,omitempty" msgpack:"shared_cache_multiplier,omitempty"`
}

// Validate returns all errors of o, each with the field's name on the wire.
func (o *Overrides) Validate() error {
	var x complaints
	x.least0("overlap_score_credit", o.OverlapScoreCredit)
	x.least0("prefill_load_scale", o.PrefillLoadScale)
	x.least0("overlap_score_weight", o.OverlapScoreWeight)
	x.least0("router_temperature", o.RouterTemperature)
	x.share("shared_cache_multiplier", o.SharedCacheMultiplier)
	return errors.Join(x...)
}

// With returns c with the replacements of o.
func (c Config) With(o *Overrides) Config {
	set(&c.OverlapScoreCredit, o.OverlapScoreCredit)
	set(&c.PrefillLoadScale, o.PrefillLoadScale)
	if o.OverlapScoreWeight != nil {
		if c.PrefillLoadScale = *o.OverlapScoreWeight; c.PrefillLoadScale == 0 {
			c.OverlapScoreCredit = 0
		}
	}
	set(&c.RouterTemperature, o.RouterTemperature)
	set(&c.RouterAssumeKVReuse, o.AssumeKVReuse)
	set(&c.RouterTrackPrefillTokens, o.TrackPrefillTokens)
	set(&c.SharedCacheMultiplier, o.SharedCacheMultiplier)
	return c
}

func set[T any](to, from *T) {
	if from != nil {
		*to = *from
	}
}

// complaints collects errors of a configuration or request.
type complaints []error

func (x *complaints) add(format string, args ...any) { *x = append(*x, fmt.Errorf(format, args...)) }

// least0 adds an error for a number that is not finite or below 0; nil is valid.
func (x *complaints) least0(name string, v *float64) {
	if v != nil && !(*v >= 0 && *v <= math.MaxFloat64) {
		x.add("%s is %v: it must be finite and at least 0", name, *v)
	}
}

// share adds an error for a number outside of 0 to 1; nil is valid.
func (x *complaints) share(name string, v *float64) {
	if v != nil && !(*v >= 0 && *v <= 1) {
		x.add("%s is %v: it must be from 0 to 1", name, *v)
	}
}

// ConfigFields returns the names of a configuration's fields on the wire, in their order.
func ConfigFields() (names []string) {
	t := reflect.TypeFor[Config]()
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		names = append(names, name)
	}
	return names
}

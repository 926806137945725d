package hicache

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Sharing is the common store of a model's workers, computed from the registrations of all ranks. It is immutable and
// safe for concurrent use.
type Sharing struct {
	// Config is the common configuration: the scheme of names and the address of the store. It is empty if no rank has
	// a store, or with a Reason.
	Config Config

	// Reason explains why the registrations have no common configuration: an invalid configuration, or a conflict, with
	// the ranks.
	Reason string

	// Bounded reports whether the computed loads are upper bounds.
	Bounded bool

	everyone bool // ranks without a registration share the store too, by the rule of Config
	common   Rule // the rule with everyone
	rules    map[events.RankKey]Rule
}

// ForAll returns a Sharing with the same configuration for all workers of the model.
func ForAll(c Config) *Sharing {
	s := &Sharing{Config: c, everyone: true}
	if err := c.Check(); err != nil {
		s.Config, s.Reason = Config{}, err.Error()
	}
	s.common, s.Bounded = s.Config.Rule(), s.Config.bounded()
	return s
}

// Share joins the registrations of a model's ranks. Ranks with empty configurations share no store.
//
// The limits of loads (threshold and capacity) may differ between ranks, because they do not change the names of
// blocks.
func Share(ranks map[events.RankKey]Config) *Sharing {
	s := &Sharing{rules: make(map[events.RankKey]Rule, len(ranks))}
	var first events.RankKey
	for _, key := range slices.SortedFunc(maps.Keys(ranks), events.RankKey.Compare) {
		c := ranks[key]
		if c == (Config{}) {
			continue
		}
		if !same(s.Config, c) {
			if err := c.Check(); err != nil {
				return &Sharing{Reason: fmt.Sprintf("%s registered an invalid configuration: %v", key, err)}
			}
			if s.Config == (Config{}) {
				s.Config, first, s.Bounded = c, key, true
			}
			if what := differs(s.Config, c); what != "" {
				return &Sharing{Reason: fmt.Sprintf("workers of this model disagree: "+what, first, key)}
			}
		}
		s.rules[key], s.Bounded = c.Rule(), s.Bounded && c.bounded()
	}
	return s
}

// Rule returns the rule for a rank's loads, or false if the rank shares no store.
func (s *Sharing) Rule(rank events.RankKey) (Rule, bool) {
	if s.everyone {
		return s.common, s.Config != Config{}
	}
	r, ok := s.rules[rank]
	return r, ok
}

// same reports whether two configurations are equal. It is a fast path for the usual case.
func same(a, b Config) bool {
	switch {
	case a.SGLang != nil && b.SGLang != nil && b.VLLM == nil:
		return reflect.DeepEqual(*a.SGLang, *b.SGLang)
	case a.VLLM != nil && b.VLLM != nil && b.SGLang == nil:
		return reflect.DeepEqual(*a.VLLM, *b.VLLM)
	}
	return false
}

// differs describes the first field that changes the content of the store and differs between two configurations. The
// result has two verbs %s for the ranks.
func differs(a, b Config) string {
	switch {
	case a.SGLang != nil && b.SGLang != nil:
		x, y := differing(a.SGLang, b.SGLang)
		return fieldThatDiffers(reflect.ValueOf(x), reflect.ValueOf(y))
	case a.VLLM != nil && b.VLLM != nil:
		return fieldThatDiffers(reflect.ValueOf(*a.VLLM), reflect.ValueOf(*b.VLLM))
	case a.VLLM != nil:
		return "%s uses vLLM's store, %s SGLang's"
	}
	return "%s uses SGLang's store, %s vLLM's"
}

func fieldThatDiffers(a, b reflect.Value) string {
	for i := range a.NumField() {
		f := a.Type().Field(i)
		if f.Anonymous {
			if what := fieldThatDiffers(a.Field(i), b.Field(i)); what != "" {
				return what
			}
			continue
		}
		if x, y := a.Field(i).Interface(), b.Field(i).Interface(); !reflect.DeepEqual(x, y) {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			say := func(v reflect.Value) string {
				if !v.IsValid() {
					return "not given"
				}
				return strings.ReplaceAll(fmt.Sprintf("%.60s", fmt.Sprint(v)), "%", "%%")
			}
			return fmt.Sprintf("%s is %s for %%s and %s for %%s", name, say(reflect.Indirect(a.Field(i))),
				say(reflect.Indirect(b.Field(i))))
		}
	}
	return ""
}

package hicache

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Sharing is how the workers of one model share a store, put together from what each of their ranks registered. It does
// not change; any number of goroutines may use it.
type Sharing struct {
	// Config is what they agree on: how names are made, and where the store is. It is empty if nobody shares a store,
	// or if there is a Reason.
	Config Config

	// Reason says why what is registered cannot be joined: a configuration that makes no sense, or two that contradict
	// each other, with the ranks that said so.
	Reason string

	// Bounded is whether what workers are found to load is an upper bound, as [SGLang.Bounded] says of all of them.
	Bounded bool

	everyone bool // ranks that registered nothing share the store too, by the rule of Config
	common   Rule // of everyone
	rules    map[events.RankKey]Rule
}

// ForAll is one configuration for whoever serves the model.
func ForAll(c Config) *Sharing {
	s := &Sharing{Config: c, everyone: true}
	if err := c.Check(); err != nil {
		s.Config, s.Reason = Config{}, err.Error()
	}
	s.common, s.Bounded = s.Config.Rule(), s.Config.Bounded()
	return s
}

// Share joins what the ranks of one model registered. Empty configurations have no say: those ranks share no store.
//
// How much an engine would load (threshold and capacity) may differ from rank to rank: it does not change what blocks
// are called.
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
				return &Sharing{Reason: fmt.Sprintf("%s registered what cannot be used: %v", key, err)}
			}
			if s.Config == (Config{}) {
				s.Config, first, s.Bounded = c, key, true
			}
			if what := differs(s.Config, c); what != "" {
				return &Sharing{Reason: fmt.Sprintf("workers of this model disagree: "+what, first, key)}
			}
		}
		s.rules[key], s.Bounded = c.Rule(), s.Bounded && c.Bounded()
	}
	return s
}

// Rule is what a rank loads of the store's blocks; false says that it shares no store.
func (s *Sharing) Rule(rank events.RankKey) (Rule, bool) {
	if s.everyone {
		return s.common, s.Config != Config{}
	}
	r, ok := s.rules[rank]
	return r, ok
}

// same reports whether two configurations surely say the same, which is how it mostly is.
func same(a, b Config) bool {
	switch {
	case a.SGLang != nil && b.SGLang != nil && b.VLLM == nil:
		return reflect.DeepEqual(*a.SGLang, *b.SGLang)
	case a.VLLM != nil && b.VLLM != nil && b.SGLang == nil:
		return reflect.DeepEqual(*a.VLLM, *b.VLLM)
	}
	return false
}

// differs names the first field in which two configurations differ that changes what is in the store, with a verb for
// each of the two who say so.
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

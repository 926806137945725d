package hicache

import (
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

func TestShare(t *testing.T) {
	rank := func(name string, r events.Rank) events.RankKey {
		return events.RankKey{Instance: events.WorkerID(name), Rank: r}
	}
	a, b := decode(t, published), decode(t, published)
	b.SGLang.PrefetchThreshold, b.SGLang.PrefetchCapacity = 6400, 12800
	s := Share(map[events.RankKey]Config{rank("a", 0): a, rank("b", 1): b, rank("none", 0): {}})
	if s.Reason != "" || s.Config.SGLang != a.SGLang {
		t.Errorf("%+v", s)
	}
	if r, ok := s.Rule(rank("a", 0)); !ok || r != (Rule{least: 4, most: noBound}) {
		t.Errorf("a: %+v, %v", r, ok)
	}
	if r, ok := s.Rule(rank("b", 1)); !ok || r != (Rule{least: 100, most: 200}) {
		t.Errorf("b: %+v, %v", r, ok)
	}
	for _, key := range []events.RankKey{rank("none", 0), rank("b", 0), rank("c", 0)} {
		if r, ok := s.Rule(key); ok {
			t.Errorf("%s has no store: %+v", key, r)
		}
	}
	if s := Share(map[events.RankKey]Config{rank("none", 0): {}}); s.Reason != "" || s.Config != (Config{}) {
		t.Errorf("no rank has a store: %+v", s)
	}

	v := Config{VLLM: &VLLM{ModelName: "m", TPSize: 1, PPSize: 1, NumKVHead: 1,
		Groups: []Group{{Kind: Full, BlockSize: 16}}, HashBlockSize: 16, SchedulerBlockSize: 16}}
	for _, c := range []struct {
		change func(*Config)
		want   string
	}{
		{func(c *Config) { c.SGLang.MetricsPort = 1 }, "disagree: master_metrics_port is 9003 for a/0 and 1 for b/1"},
		{func(c *Config) { c.SGLang.PageSize = 0 },
			"b/1 registered an invalid configuration: hicache: sglang_hicache_mooncake: page_size 0"},
		{func(c *Config) { c.SGLang.Backend = "hf3fs" }, `backend "hf3fs"`},
		{func(c *Config) { c.SGLang.ExtraBackendTag = "50%d" }, "extra_backend_tag is  for a/0 and 50%d for b/1"},
		{func(c *Config) { c.SGLang.EngineVersion, c.SGLang.ModelName = "0.5.23", "m" },
			"model_name is  for a/0 and m for b/1"},
		{func(c *Config) { *c = v }, "a/0 uses SGLang's store, b/1 vLLM's"},
		{func(c *Config) { c.VLLM = v.VLLM }, "a worker has both a store of SGLang and a store of vLLM"},
	} {
		b := decode(t, published)
		c.change(&b)
		s := Share(map[events.RankKey]Config{rank("a", 0): a, rank("b", 1): b})
		if !strings.Contains(s.Reason, c.want) || s.Config != (Config{}) {
			t.Errorf("%q, want %q; %+v", s.Reason, c.want, s.Config)
		}
		if _, ok := s.Rule(rank("a", 0)); ok {
			t.Errorf("%s: unexpected rule", c.want)
		}
	}

	if s := ForAll(a); s.Reason != "" || s.Config != a {
		t.Errorf("%+v", s)
	} else if r, ok := s.Rule(rank("anybody", 7)); !ok || r.least != 4 {
		t.Errorf("%+v, %v", r, ok)
	}
	a.SGLang.TPSize = 0
	if s := ForAll(a); !strings.Contains(s.Reason, "tp_size") || s.Config != (Config{}) {
		t.Errorf("%+v", s)
	}
}

// TestReleaseDecidesNames: the release sets the open fields, and set fields override the release.
func TestReleaseDecidesNames(t *testing.T) {
	yes, no := true, false
	for _, c := range []struct {
		s                     SGLang
		model, plain, ignored bool
	}{
		{SGLang{}, false, false, false},
		{SGLang{ModelName: "m"}, true, false, false},
		{SGLang{EngineVersion: "0.5.7"}, false, true, true},
		{SGLang{EngineVersion: "v0.5.8"}, false, false, true},
		{SGLang{EngineVersion: "0.5.16.post1"}, false, false, true},
		{SGLang{EngineVersion: "0.5.17rc1"}, true, false, true},
		{SGLang{EngineVersion: "0.5.20"}, true, false, false},
		{SGLang{EngineVersion: "1.0.0"}, true, false, false},
		{SGLang{EngineVersion: "0.5.23", ModelInKeys: &no, MLAKeyStyle: "plain", Namespaces: "ignored"}, false, true,
			true},
		{SGLang{EngineVersion: "0.5.3", ModelInKeys: &yes, MLAKeyStyle: "rank", Namespaces: "hashed"}, true, false,
			false},
	} {
		if m, p, i := c.s.modelInKeys(), c.s.plainStyle(), c.s.namespacesIgnored(); m != c.model || p != c.plain ||
			i != c.ignored {
			t.Errorf("%+v: model in keys %v, plain %v, namespaces ignored %v", c.s, m, p, i)
		}
	}
	for _, text := range []string{"", "1", "1.2", "1.2.x", "x.1.2", "..", "1.2.", "99999999999999999999.1.1"} {
		if _, err := parseVersion(text); err == nil {
			t.Errorf("%q is parsed as a release", text)
		}
	}
	c := decode(t, published)
	for version, want := range map[string]string{"0.5.23": "model_name", "newest": "engine_version"} {
		if c.SGLang.EngineVersion = version; c.Check() == nil {
			t.Errorf("engine_version %s", version)
		} else if err := c.Check(); !strings.Contains(err.Error(), want) {
			t.Errorf("engine_version %s: %v, want %s", version, err, want)
		}
	}
}

func TestParseConfig(t *testing.T) {
	if c, passed, err := ParseConfig([]byte(published)); err != nil || passed != nil || c.SGLang.PageSize != 64 {
		t.Errorf("%+v, %v, %v", c, passed, err)
	}
	newer := strings.Replace(published, `"page_size"`, `"of_next_year":{"a":[1]},"page_size"`, 1)
	if c, passed, err := ParseConfig([]byte(newer)); err != nil || c.SGLang.PageSize != 64 || passed == nil ||
		passed.String() != "of_next_year" {
		t.Errorf("with a field of a newer worker: %+v, %v, %v", c, passed, err)
	}
	twice := strings.Replace(published, `"page_size"`, `"page_size":1,"page_size"`, 1)
	for text, want := range map[string]string{
		twice: "is given twice",
		strings.Replace(published, "page_size", "pagesize", 1):  "page_size",
		strings.Replace(published, "64", `"64"`, 1):             "mooncake.page_size is text, not a whole number",
		strings.Replace(published, "64", "0", 1):                "page_size",
		strings.Replace(published, "page_size", "Page_size", 1): "page_size",
		"":   "invalid JSON: unexpected end",
		"[]": "it is a list, not an object",
		"{x": "invalid JSON: invalid character",
	} {
		if _, _, err := ParseConfig([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

func TestParseModels(t *testing.T) {
	models, passed, err := ParseModels([]byte(`{"a":` + published + `,"b":{},"c":{"odd":1,"even":2}}`))
	if err != nil || len(models) != 3 || models["a"].SGLang.PageSize != 64 || len(passed) != 1 ||
		passed["c"].String() != "odd, even" {
		t.Errorf("%+v, %v, %v", models, passed, err)
	}
	for text, want := range map[string]string{
		`{"a":` + strings.Replace(published, "64", "true", 1) + `}`: "mooncake.page_size is true or false, not a whole",
		`{"a":7}`: `model "a": it is the number, not an object`,
		`7`:       "it is the number, not an object",
	} {
		if _, _, err := ParseModels([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

package hicache

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

// servedLayout is a reply of GET /get_hicache_l3_cache_layout of SGLang 0.5.23.
const servedLayout = `{"enabled":true,"backend":"mooncake","page_size":64,"hicache_object_layout":{"pools":[
{"pool":"kv","suffixes":["__k"],"hit_policy":"all_pages"},
{"pool":"indexer","suffixes":["__indexer"],"hit_policy":"all_pages"},
{"pool":"swa","suffixes":["__swa"],"hit_policy":"trailing_pages","trailing_pages":2}],
"key_prefix":"blue_org-m","is_mla_backend":true,"pp_rank":0,"pp_size":1}}`

// hybrid returns a configuration with a layout, in JSON.
func hybrid(layout string, more ...string) string {
	fields := append([]string{`"backend":"mooncake","page_size":64,"tp_size":2,"pp_size":1,"is_mla_model":true`,
		`"master_server_address":"10.0.0.1:50051","hicache_object_layout":` + layout}, more...)
	return `{"sglang_hicache_mooncake":{` + strings.Join(fields, ",") + `}}`
}

// inner returns the inner object of a reply.
func inner(reply string) string {
	return strings.TrimSuffix(reply[strings.LastIndex(reply, `{"pools"`):], "}")
}

func TestObjectLayout(t *testing.T) {
	for name, text := range map[string]string{"reply": servedLayout, "object": inner(servedLayout)} {
		c, passed, err := ParseConfig([]byte(hybrid(text)))
		if err != nil || slices.Contains(passed, "pools") {
			t.Fatal(name, passed, err)
		}
		pages := c.SGLang.PageHashes(nil, make([]uint32, 64), Space{})
		h := "blue_org-m_" + pages[0].String()
		if got := c.SGLang.Keys(pages).Keys; !slices.Equal(got, []string{h + "__k", h + "__indexer"}) {
			t.Error(name, got)
		}
		prompt, err := c.Prompt(make([]uint32, 128), "", "", 64)
		if err != nil || len(prompt.Lanes) != 2 || prompt.Unbroken || c.bounded() {
			t.Fatal(name, prompt, err)
		}
		if got := prompt.Lanes[1].Names(0, 1).Keys; !slices.Equal(got, []string{h + "__swa"}) {
			t.Error(name, got)
		}
	}
}

// TestObjectLayoutWithoutKV: for a model without a pool of keys and values, such as DeepSeek V4, the pools that exist
// count.
func TestObjectLayoutWithoutKV(t *testing.T) {
	c, _, err := ParseConfig([]byte(hybrid(`{"pools":[{"pool":"deepseek_v4_c4","suffixes":["__deepseek_v4_c4"],
		"hit_policy":"all_pages"},{"pool":"groups","suffixes":["__g"],"hit_policy":"block_groups"}]}`)))
	if err != nil {
		t.Fatal(err)
	}
	pages := c.SGLang.PageHashes(nil, make([]uint32, 64), Space{})
	if got := c.SGLang.Keys(pages).Keys; !slices.Equal(got, []string{pages[0].String() + "__deepseek_v4_c4"}) {
		t.Error(got)
	}
}

// TestObjectLayoutOfStages: with several pipeline ranks, SGLang repeats each pool.
func TestObjectLayoutOfStages(t *testing.T) {
	c, _, err := ParseConfig([]byte(hybrid(`{"pools":[{"pool":"kv","suffixes":["_0_k"]},{"pool":"kv","suffixes":["_1_k"]}],
		"pp_rank":null,"pp_size":2}`)))
	if err != nil {
		t.Fatal(err)
	}
	if keys := c.SGLang.Keys(c.SGLang.PageHashes(nil, make([]uint32, 64), Space{})).Keys; len(keys) != 2 {
		t.Error(keys)
	}
}

func TestObjectLayoutRefused(t *testing.T) {
	for text, want := range map[string]string{
		hybrid(strings.Replace(servedLayout, `"all_pages"`, `"most_pages"`, 1)):      `"most_pages": want all_pages`,
		hybrid(strings.Replace(servedLayout, `"trailing_pages":2`, `"x":2`, 1)):      "trailing_pages 0: want 1",
		hybrid(strings.Replace(servedLayout, `"page_size":64`, `"page_size":32`, 1)): "pages of 32 tokens",
		hybrid(strings.Replace(servedLayout, `"mooncake"`, `"hf3fs"`, 1)):            `backend "hf3fs"`,
		hybrid(strings.Replace(servedLayout, `"pp_size":1`, `"pp_size":2`, 1)):       "pipeline rank 0 alone, of 2",
		hybrid(strings.Replace(servedLayout, `["__k"]`, `[]`, 1)):                    "has no suffixes",
		hybrid(strings.Replace(servedLayout, `["__k"]`, `[""]`, 1)):                  `suffix "" has 0 bytes`,
		hybrid(strings.Replace(servedLayout, `["__k"]`, `"__k"`, 1)):                 "suffixes is text, not a list",
		hybrid(strings.Replace(servedLayout, `"pool":"kv"`, `"pool":7`, 1)):          "pool is the number, not text",
		hybrid(`7`): "hicache_object_layout is the number, not an object",
		hybrid(`{"pools":[{"pool":"g","suffixes":["__g"],"hit_policy":"block_groups"}]}`): "no pool decides",
		hybrid(servedLayout, `"key_prefix":"green"`):                                      `key_prefix "green"`,
		strings.Replace(hybrid(servedLayout, `"model_name":"m","directory":"/d"`), `"backend":"mooncake"`,
			`"backend":"file"`, 1): "objects of backend mooncake",
	} {
		if _, _, err := ParseConfig([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v\n%s", want, err, text)
		}
	}
}

// TestObjectLayoutDisabled: an engine without a list of objects has a reason and a key prefix.
func TestObjectLayoutDisabled(t *testing.T) {
	text := `{"enabled":false,"backend":"mooncake","page_size":64,"reason":"External L3 lookup requires MLA pools",
		"hicache_object_layout":{"pools":[],"key_prefix":"org-m","is_mla_backend":false,"pp_rank":0,"pp_size":2}}`
	c, _, err := ParseConfig([]byte(strings.Replace(hybrid(text), `"is_mla_model":true`, `"is_mla_model":false`, 1)))
	if err != nil {
		t.Fatal(err)
	}
	pages := c.SGLang.PageHashes(nil, make([]uint32, 64), Space{})
	if got := c.SGLang.Keys(pages).Keys; len(got) != 4 || got[0] != "org-m_"+pages[0].String()+"_0_k" {
		t.Error(got)
	}
}

// TestBounded: without a layout, the objects of an MLA model's page are unknown.
func TestBounded(t *testing.T) {
	mla := strings.Replace(published, `"is_mla_model":false`, `"is_mla_model":true`, 1)
	for text, want := range map[string]bool{
		published:            false,
		mla:                  true,
		hybrid(servedLayout): false,
		strings.Replace(published, `"tp_size"`, `"model_name":"openai/GPT-OSS-120b","tp_size"`, 1):         true,
		strings.Replace(published, `"tp_size"`, `"key_prefix":"blue_Qwen-Qwen3-Next-80B","tp_size"`, 1):    true,
		strings.Replace(mla, `"tp_size"`, `"hybrid":false,"tp_size"`, 1):                                   false,
		strings.Replace(published, `"tp_size"`, `"hybrid":true,"tp_size"`, 1):                              true,
		strings.Replace(mla, `"tp_size"`, `"engine_version":"0.5.10","tp_size"`, 1):                        false,
		strings.Replace(mla, `"tp_size"`, `"engine_version":"0.5.23","model_name":"m","tp_size"`, 1):       true,
		strings.Replace(hybrid(`{"enabled":false,"hicache_object_layout":{"pools":[]}}`), `"x"`, `"x"`, 1): true,
	} {
		c, _, err := ParseConfig([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if c.bounded() != want || ForAll(c).Bounded != want {
			t.Errorf("%v, want %v: %s", c.bounded(), want, text)
		}
	}
}

// FuzzObjectLayout: a layout that passes Check names objects without a panic, with the same number for each page.
func FuzzObjectLayout(f *testing.F) {
	f.Add([]byte(servedLayout))
	f.Add([]byte(inner(servedLayout)))
	f.Add([]byte(`{"enabled":false,"hicache_object_layout":{"pools":[]},"reason":"none"}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var layout ObjectLayout
		if json.Unmarshal(text, &layout) != nil {
			return
		}
		c := Config{SGLang: &SGLang{Backend: "mooncake", PageSize: 64, TPSize: 1, PPSize: 1, IsMLA: true,
			ObjectLayout: &layout}}
		if c.Check() != nil {
			return
		}
		prompt, err := c.Prompt(make([]uint32, 3*64), "", "", 64)
		if err != nil {
			t.Fatal(err)
		}
		var found []Found
		for _, lane := range prompt.Lanes {
			if keys := lane.Names(0, 3); keys.PerPage == 0 || len(keys.Keys) != 3*keys.PerPage {
				t.Errorf("%d keys, %d of a page", len(keys.Keys), keys.PerPage)
			}
			found = append(found, Found{Present: Bitmap{5}, Known: Bitmap{7}})
		}
		if n, _ := prompt.Map(found).Load(0, Rule{most: noBound}); n > 3 {
			t.Error(n)
		}
		if prompt.Keys(1); c.Identity() == "" {
			t.Error("no identity")
		}
	})
}

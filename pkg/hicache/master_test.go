package hicache

import (
	"slices"
	"strings"
	"testing"
)

// TestKeyPrefix: a key_prefix of Dynamo 1.6.1 and 1.7 names the same objects as a tag and a model's name.
func TestKeyPrefix(t *testing.T) {
	const dynamo = `{"sglang_hicache_mooncake":{"backend":"mooncake","page_size":16,"tp_size":2,"pp_size":1,
		"is_mla_model":true,"is_eagle":false,"tp_lcm_size":null,"should_split_heads":false,"extra_backend_tag":null,
		"key_prefix":PREFIX,"kv_events_endpoint":null,"tenant_id":TENANT}}`
	parse := func(prefix, tenant string, change ...string) Config {
		t.Helper()
		text := strings.NewReplacer(append(change, "PREFIX", prefix, "TENANT", tenant)...).Replace(dynamo)
		c, passed, err := ParseConfig([]byte(text))
		if err != nil || len(passed) > 0 {
			t.Fatalf("%s: %v %v", text, passed, err)
		}
		return c
	}
	page := (&SGLang{PageSize: 1}).PageHashes(nil, []uint32{7}, Space{})
	hash := page[0].String()
	older := []string{`"extra_backend_tag":null,
		"key_prefix":PREFIX,"kv_events_endpoint":null,"tenant_id":TENANT`}
	for _, c := range []struct {
		name string
		of   Config
		want string
	}{
		{"model", parse(`"org-m"`, "null"), "org-m_" + hash + "__k"},
		{"tag and model", parse(`"blue_org-m"`, `"default"`), "blue_org-m_" + hash + "__k"},
		{"none", parse("null", "null"), hash + "__k"},
		{"the tag is part of it", parse(`"blue_m"`, "null", `"extra_backend_tag":null`, `"extra_backend_tag":"blue"`),
			"blue_m_" + hash + "__k"},
		{"a release wants no model_name then", parse(`"m"`, "null", `"tp_size"`, `"engine_version":"0.5.23","tp_size"`),
			"m_" + hash + "__k"},
		{"as before", parse("", "", append(older, `"extra_backend_tag":"t","model_name":"org/m"`)...), ""},
	} {
		if c.want == "" {
			c.want = "t_org-m_" + hash + "__k"
		}
		if got := c.of.SGLang.Keys(page).Keys; !slices.Equal(got, []string{c.want}) {
			t.Errorf("%s: %v, want %s", c.name, got, c.want)
		}
	}
	tagged := parse(`"blue_m"`, "null")
	named := parse("null", `""`, `"extra_backend_tag":null`, `"extra_backend_tag":"blue","model_name":"m"`)
	if what := differs(tagged, named); what != "" {
		t.Error("a prefix and its parts differ:", what)
	}
	if what := differs(tagged, parse(`"green_m"`, "null")); !strings.Contains(what, "key_prefix is blue_m") {
		t.Error(what)
	}
	other := parse(`"m"`, `"team"`)
	if why := other.Usable(16); !strings.Contains(why, `tenant_id is "team"`) {
		t.Error("another tenant:", why)
	}
	if what := differs(parse(`"m"`, "null"), other); !strings.Contains(what, "tenant_id") {
		t.Error(what)
	}
	if fixed := other.WithMaster(Master{Address: "h:1"}); fixed.Where() != "h:9003" || other.Where() != "" {
		t.Error(fixed.Where(), other.Where())
	}
}

func TestMasterAddresses(t *testing.T) {
	for _, c := range []struct {
		address, cluster string
		where            string // or a part of the error
		hosts            []string
		key              string // key of an election
	}{
		{"mooncake:50051", "", "mooncake:9003", []string{"mooncake"}, ""},
		{"mooncake", "", "mooncake:9003", []string{"mooncake"}, ""},
		{"[::1]:50051", "", "[::1]:9003", []string{"::1"}, ""},
		{"", "", "", nil, ""},
		{"etcd://a:2379", "", "etcd://a:2379 mooncake_cluster", []string{"a"}, "mooncake-store/mooncake_cluster/master_view"},
		{"etcd://10.0.0.1:2379; [::1]:2379;", "blue/", "etcd://10.0.0.1:2379;[::1]:2379 blue/", []string{"10.0.0.1", "::1"},
			"mooncake-store/blue/master_view"},
		{"etcd://http://a:2379", "", "etcd://a:2379 mooncake_cluster", []string{"a"},
			"mooncake-store/mooncake_cluster/master_view"},
		{"etcd://", "", "0 members", nil, ""},
		{"etcd://a:b", "", "not HOST:PORT", nil, ""},
		{"etcd://a:1,b:2", "", "not HOST:PORT", nil, ""},
		{"k8s://ns/lease", "", "not in k8s; give HOST:PORT", nil, ""},
		{"redis://h:6379", "", "not in redis", nil, ""},
		{"ETCD://h:6379", "", "not in ETCD", nil, ""},
		{"http://h:9003", "", "not in http", nil, ""},
		{"a b", "", "not HOST:PORT", nil, ""},
	} {
		for _, config := range []Config{
			{SGLang: &SGLang{Backend: "mooncake", PageSize: 16, TPSize: 1, PPSize: 1,
				Master: Master{Address: c.address, ClusterID: c.cluster}}},
			{VLLM: &VLLM{ModelName: "m", TPSize: 1, PPSize: 1, NumKVHead: 1, HashBlockSize: 16, SchedulerBlockSize: 16,
				Groups: []Group{{Kind: Full, BlockSize: 16}},
				Master: Master{Address: c.address, ClusterID: c.cluster}}},
		} {
			err := config.Check()
			if bad := config.CheckMaster(); (bad == nil) != (err == nil) {
				t.Errorf("%q: Check returns %v, CheckMaster %v", c.address, err, bad)
			}
			if err != nil {
				if !strings.Contains(err.Error(), c.where) || c.where == "" {
					t.Errorf("%q: %v, want %q", c.address, err, c.where)
				}
				continue
			}
			election, elected := config.Election()
			if config.Where() != c.where || !slices.Equal(config.MasterHosts(), c.hosts) || elected != (c.key != "") ||
				elected && election.Key != c.key {
				t.Errorf("%q: %q %v %+v", c.address, config.Where(), config.MasterHosts(), election)
			}
		}
	}
}

func TestLeader(t *testing.T) {
	e := Election{MetricsPort: 9004}
	for value, want := range map[string]string{"10.0.0.7:50051": "10.0.0.7:9004", "[::1]:1": "[::1]:9004"} {
		if got, err := e.Leader(value); got != want || err != nil {
			t.Errorf("%q: %q %v", value, got, err)
		}
	}
	for _, value := range []string{"", "0.0.0.0:50051", "[::]:1", "a b:1", "\x00", "a/b:1"} {
		if got, err := e.Leader(value); err == nil {
			t.Errorf("%q: %q", value, got)
		}
	}
}

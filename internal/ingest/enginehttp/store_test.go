package enginehttp

import (
	"reflect"
	"strings"
	"testing"
)

// TestStore reads the settings of an engine with a shared store: the capacity of its host pool and the objects of a
// page.
func TestStore(t *testing.T) {
	const layout = `{"enabled":true,"backend":"mooncake","page_size":16,"hicache_object_layout":{"pools":[]}}`
	server := func(more string) string {
		return strings.Replace(`{"version":"0.5.23","served_model_name":"m","page_size":16,"max_total_num_tokens":1000,
			"kv_events_config":"{\"publisher\":\"zmq\"}",MORE}`, "MORE", more, 1)
	}
	for _, c := range []struct {
		more string
		want *Store
	}{
		{`"hicache_storage_backend":null`, nil},
		{`"hicache_storage_backend":"mooncake","hicache_ratio":2.0,"hicache_size":0,"hicache_host_memory_mode":"cache"`,
			&Store{Layout: []byte(layout), HostTokens: 2016, DeviceTokens: 1000}},
		{`"hicache_storage_backend":"mooncake","hicache_ratio":1.2,"hicache_host_memory_mode":"buffer_only"`,
			&Store{Layout: []byte(layout), HostTokens: 1216, DeviceTokens: 1000, BufferOnly: true}},
		{`"hicache_storage_backend":"mooncake","hicache_ratio":2.0,"hicache_size":30`,
			&Store{Layout: []byte(layout), DeviceTokens: 1000}}, // in bytes
		{`"hicache_storage_backend":"mooncake","hicache_ratio":null`, &Store{Layout: []byte(layout), DeviceTokens: 1000}},
		{`"hicache_storage_backend":"mooncake","hicache_ratio":-1`, &Store{Layout: []byte(layout), DeviceTokens: 1000}},
		{`"hicache_storage_backend":"mooncake","hicache_ratio":1e300`, &Store{Layout: []byte(layout), DeviceTokens: 1000}},
		{`"hicache_storage_backend":"mooncake","hicache_ratio":2,"dcp_size":2`,
			&Store{Layout: []byte(layout), DeviceTokens: 1000}},
	} {
		answers := map[string]string{"/server_info": server(c.more), "/get_hicache_l3_cache_layout": layout}
		got, err := engineOf(t, answers).Ask(t.Context())
		if err != nil || !reflect.DeepEqual(got.Store, c.want) {
			t.Errorf("%s: %+v, %v; want %+v", c.more, got.Store, err, c.want)
		}
		delete(answers, "/get_hicache_l3_cache_layout") // a release before 0.5.23
		if got, err = engineOf(t, answers).Ask(t.Context()); err != nil || got.Store != nil && got.Store.Layout != nil {
			t.Errorf("%s, without a layout: %+v, %v", c.more, got.Store, err)
		}
	}
}

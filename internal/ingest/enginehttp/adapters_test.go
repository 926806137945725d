package enginehttp

import (
	"encoding/json"
	"testing"
)

// TestUnnamedAdapters covers settings and versions that are missing in the goldens.
func TestUnnamedAdapters(t *testing.T) {
	for _, c := range []struct {
		info, format string
		want         bool
	}{
		{`{"version":"0.5.22"}`, "", false},
		{`{"version":"0.5.22","enable_lora":false,"lora_paths":["a"]}`, "", false},
		{`{"version":"0.5.22","enable_lora":null,"lora_paths":null}`, "", false},
		{`{"version":"0.5.22","lora_paths":[]}`, "", false},
		{`{"version":"0.5.22","lora_paths":{}}`, "default", false},
		{`{"version":"0.5.22","lora_paths":"a"}`, "", false},
		{`{"version":"0.5.22","enable_lora":true}`, "", true},
		{`{"version":"0.5.22","enable_lora":null,"lora_paths":["a=/a"]}`, "default", true},
		{`{"version":"0.5.22","lora_paths":{"a":"/a"}}`, "", true},
		{`{"version":"0.5.22.post1","enable_lora":true}`, "", true},
		{`{"version":"0.5.22.post1","enable_lora":true}`, "dynamo", false},
		{`{"version":"0.5.21","enable_lora":true}`, "dynamo", true},
		{`{"version":"0.5.9","enable_lora":true}`, "", true},
		{`{"version":"0.4.30","enable_lora":true}`, "", true},
		{`{"version":"0.5.23rc1","enable_lora":true}`, "", false},
		{`{"version":"0.5.24.dev7+g1a2b","enable_lora":true}`, "", false},
		{`{"version":"0.6","enable_lora":true}`, "", false},
		{`{"version":"1.0.0","enable_lora":true}`, "", false},
		{`{"version":"unknown","enable_lora":true}`, "", false},
		{`{"enable_lora":true}`, "", false},
	} {
		var info serverInfo
		if err := json.Unmarshal([]byte(c.info), &info); err != nil {
			t.Fatal(err)
		}
		if got := info.unnamesAdapters(c.format); got != c.want {
			t.Errorf("%s, format %q: %v", c.info, c.format, got)
		}
	}
}

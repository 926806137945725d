package enginehttp

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// NameAdapters is the remedy for an engine without adapter names in its events.
const NameAdapters = `use SGLang 0.5.23, or add "format":"dynamo" to the --kv-events-config of 0.5.22; ` +
	"or start the engine without --enable-lora and --lora-paths"

// unnamesAdapters reports whether SGLang serves adapters but does not name the adapter of a block in its events. The
// format dynamo contains the name from 0.5.22 on, and every format from 0.5.23 on (KVCacheEventRecorder in
// sgl-project/sglang › python/sglang/srt/mem_cache/events.py). The result is false for an unknown version.
func (info *serverInfo) unnamesAdapters(format string) bool {
	names := []int{0, 5, 23}
	if format == "dynamo" {
		names = []int{0, 5, 22}
	}
	version := numbers(info.Version)
	return info.servesAdapters() && version != nil && slices.Compare(version, names) < 0
}

// servesAdapters reports whether adapters may be loaded. If enable_lora is missing, adapters in lora_paths enable it.
func (info *serverInfo) servesAdapters() bool {
	if info.EnableLoRA != nil {
		return *info.EnableLoRA
	}
	switch text := bytes.TrimSpace(info.LoRAPaths); {
	case len(text) == 0:
		return false
	case text[0] == '[':
		var list []json.RawMessage
		return strictjson.Unmarshal(text, &list) == nil && len(list) > 0
	case text[0] == '{':
		var named map[string]json.RawMessage
		return strictjson.Unmarshal(text, &named) == nil && len(named) > 0
	}
	return false
}

// numbers returns the numbers at the beginning of a version: 0, 5, 22 of 0.5.22.post1 and of 0.5.22rc1. nil means that
// the version has none.
func numbers(version string) (list []int) {
	for part := range strings.SplitSeq(version, ".") {
		digits := len(part) - len(strings.TrimLeft(part, "0123456789"))
		n, err := strconv.Atoi(part[:digits])
		if err != nil {
			break
		}
		if list = append(list, n); digits < len(part) {
			break
		}
	}
	return list
}

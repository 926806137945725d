package integration

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// lenient are the files that decode JSON only with encoding/json, with the reason that it is safe. encoding/json
// ignores the case of names, and uses the last of duplicate names. All other files use internal/base/strictjson or the
// readers of pkg/api.
var lenient = map[string]string{
	"internal/serve/remote/prompt.go":                 "a text of the user's own command line",
	"internal/operate/upkeep/lameduck.go":             "answers of the NATS server",
	"internal/text/bpe/bpe.go":                        "a file of the operator's",
	"internal/text/tokenize/chat.go":                  "a file of the operator's",
	"internal/text/tokenize/compare.go":               "a file of the user's",
	"internal/text/tokenize/service.go":               "one text or a list of texts",
	"internal/text/jinja/decode.go":                   "values without fields: of two keys the last counts, as in Python",
	"internal/faces/compat/conductor/http.go":         "our own answer, once more as MessagePack",
	"internal/faces/compat/conductor/requests.go":     "a text, or a list of raw values; objects are read by api.Members",
	"internal/faces/compat/dynamoselect/http.go":      "text, and a raw value that api.Members reads",
	"internal/faces/compat/dynamoselect/ranktexts.go": "of two equal names the last counts, as in Dynamo",
	"internal/ingest/kube/copy.go":                    "frames of a watch; their objects are decoded strictly",
	"internal/ingest/etcd/etcd.go":                    "answers of etcd",
	"internal/base/strictjson/strictjson.go":          "the strict reader itself",
	"pkg/api/handle.go":                               "replies to clients; requests have a separate reader",
	"internal/ingest/sharedstore/mooncake.go":         "answers of a store's master",
	"internal/ingest/sharedstore/reply.go":            "answers of a store's master",
	"pkg/jetstream/batch.go":                          "answers of the NATS server",
	"pkg/jetstream/claims.go":                         "answers of the NATS server",
	"pkg/jetstream/conn.go":                           "answers of the NATS server",
	"pkg/snapshot/manifest.go":                        "what nodes write",
	"pkg/snapshot/ranks.go":                           "what nodes write",
}

// TestStrictJSON: a new decoder of JSON uses internal/base/strictjson, or has a reason in the list.
func TestStrictJSON(t *testing.T) {
	t.Parallel()
	decodes := regexp.MustCompile(`\bjson\.(Unmarshal|NewDecoder)\(`)
	found := map[string]bool{}
	for _, root := range []string{"cmd", "internal", "pkg"} {
		err := filepath.WalkDir(filepath.Join("..", root), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			if name := filepath.ToSlash(strings.TrimPrefix(path, "../")); decodes.Match(text) {
				found[name] = true
				if lenient[name] == "" {
					t.Errorf("%s decodes with encoding/json; use internal/base/strictjson, or add the reason here", name)
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for name := range lenient {
		if !found[name] {
			t.Errorf("%s is in the list and decodes nothing by encoding/json", name)
		}
	}
}

//go:build judges

package fields

import (
	"archive/zip"
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/text/fields"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// models are the classes of request bodies, as FILE:NAME, by engine and API. A name may be a union of classes.
var models = map[string]map[fields.API][]string{
	"vllm": {
		fields.Completions: {"vllm/entrypoints/openai/completion/protocol.py:CompletionRequest"},
		fields.Chat:        {"vllm/entrypoints/openai/chat_completion/protocol.py:ChatCompletionRequest"},
		fields.Embeddings:  {"vllm/entrypoints/pooling/embed/protocol.py:EmbeddingRequest"},
		fields.Score:       {"vllm/entrypoints/pooling/scoring/protocol.py:ScoreRequest"},
		fields.Rerank:      {"vllm/entrypoints/pooling/scoring/protocol.py:RerankRequest"},
		fields.Responses:   {"vllm/entrypoints/openai/responses/protocol.py:ResponsesRequest"},
		fields.Messages:    {"vllm/entrypoints/anthropic/protocol.py:AnthropicMessagesRequest"},
	},
	"sglang": {
		fields.Completions: {"sglang/srt/entrypoints/openai/protocol.py:CompletionRequest"},
		fields.Chat:        {"sglang/srt/entrypoints/openai/protocol.py:ChatCompletionRequest"},
		fields.Embeddings:  {"sglang/srt/entrypoints/openai/protocol.py:EmbeddingRequest"},
		fields.Score:       {"sglang/srt/entrypoints/openai/protocol.py:ScoringRequest"},
		fields.Rerank:      {"sglang/srt/entrypoints/openai/protocol.py:V1RerankReqInput"},
		fields.Responses:   {"sglang/srt/entrypoints/openai/protocol.py:ResponsesRequest"},
		fields.Messages:    {"sglang/srt/entrypoints/anthropic/protocol.py:AnthropicMessagesRequest"},
	},
}

// readBody has the fields of each model, and the names that validators read from the body.
type readBody struct{ Fields, Read []string }

// TestTablesHaveAllFields: each field of a request model has a class, and no engine reads an ignored field.
func TestTablesHaveAllFields(t *testing.T) {
	for engine, apis := range models {
		pinned := newest(t, engine)
		for api, read := range readModels(t, pyenv.Wheel(t, pinned), apis) {
			table := fields.TableOf(api)
			if len(read.Fields) < 5 {
				t.Errorf("%s has only the fields %v in %s: the script misses some", pinned, read.Fields, api)
			}
			for _, name := range slices.Concat(read.Fields, read.Read) {
				switch class := table[name]; class {
				case 0:
					t.Errorf("%s reads the field %s of %s, which has no class in internal/text/fields", pinned, name, api)
				case fields.Ignored:
					t.Errorf("%s reads the field %s of %s, which internal/text/fields calls ignored", pinned, name, api)
				}
			}
		}
	}
}

// TestScriptFindsNewFields: the script finds the fields of unions, bases and aliases, and names in validators.
func TestScriptFindsNewFields(t *testing.T) {
	path := filepath.Join(t.TempDir(), "engine.whl")
	var wheel bytes.Buffer
	z := zip.NewWriter(&wheel)
	for name, text := range map[string]string{
		"engine/base.py": "class Base(BaseModel):\n    model_config = 1\n    of_base: int = 0\n",
		"engine/protocol.py": `from .base import Base
class One(Base):
    first: int
    _private: int = PrivateAttr(default=0)
    kept: ClassVar[int] = 1
    schema_: dict = Field(default=None, alias="schema")
    @model_validator(mode="before")
    @classmethod
    def read(cls, data):
        return {**data, "first": data.get("unlisted"), "x": data["other"]}
class Two(BaseModel):
    second: str | None = None
Request: TypeAlias = Annotated[One | Two, Field()]
`} {
		w, err := z.Create(name)
		if err == nil {
			_, err = w.Write([]byte(text))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, wheel.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	got := readModels(t, path, map[fields.API][]string{fields.Chat: {"engine/protocol.py:Request"}})[fields.Chat]
	if want := []string{"first", "of_base", "schema", "schema_", "second"}; !slices.Equal(got.Fields, want) {
		t.Errorf("fields %v, want %v", got.Fields, want)
	}
	if want := []string{"other", "unlisted"}; !slices.Equal(got.Read, want) {
		t.Errorf("names in validators %v, want %v", got.Read, want)
	}
}

// readModels reads the models of a wheel.
func readModels(t *testing.T, wheel string, apis map[fields.API][]string) (read map[fields.API]readBody) {
	t.Helper()
	in, err := json.Marshal(apis)
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(pyenv.Python(t), pyenv.Script(t, "request_fields.py"), wheel)
	c.Stdin, c.Stderr = bytes.NewReader(in), os.Stderr
	out, err := c.Output()
	if err == nil {
		err = json.Unmarshal(out, &read)
	}
	if err != nil || len(read) != len(apis) {
		t.Fatalf("%s: %v, %d APIs", wheel, err, len(read))
	}
	return read
}

// newest returns the newest pinned wheel of a package, as "name==version".
func newest(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(pyenv.Script(t, "wheels.txt"))
	if err != nil {
		t.Fatal(err)
	}
	var best []int
	pinned := ""
	for _, m := range regexp.MustCompile(`(?m)^`+name+`==([0-9.]+) `).FindAllSubmatch(text, -1) {
		var version []int
		for part := range strings.SplitSeq(string(m[1]), ".") {
			n, err := strconv.Atoi(part)
			if err != nil {
				t.Fatal(err)
			}
			version = append(version, n)
		}
		if slices.Compare(version, best) > 0 {
			best, pinned = version, name+"=="+string(m[1])
		}
	}
	if pinned == "" {
		t.Fatalf("wheels.txt has no wheel of %s", name)
	}
	return pinned
}

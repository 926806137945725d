package tokenize

import (
	"encoding/json"
	"fmt"
	"os"

	"go.yaml.in/yaml/v3"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// ReadSettings reads the tokenizer of each model from a YAML or JSON file. An empty path returns no tokenizers.
func ReadSettings(path string) (s Settings, err error) {
	if path == "" {
		return s, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return s, err
	}
	var given map[string]any
	if err := yaml.Unmarshal(text, &given); err != nil {
		return s, fmt.Errorf("%s is not YAML: %w", path, err)
	}
	if text, err = json.Marshal(given); err != nil {
		return s, fmt.Errorf("%s: %w", path, err)
	}
	if err := strictjson.UnmarshalKnown(text, &s); err != nil {
		return s, fmt.Errorf("%s: %w; see docs/text.md", path, err)
	}
	if err := s.Complete(os.ReadFile); err != nil {
		return s, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

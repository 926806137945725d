package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// readRouting reads the constants of a choice from a YAML or JSON file. A missing constant has its default. An empty
// path is no file.
func readRouting(path string) (routing.Config, error) {
	c := routing.DefaultConfig()
	if path == "" {
		return c, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return c, err
	}
	var given map[string]any
	if err := yaml.Unmarshal(text, &given); err != nil {
		return c, fmt.Errorf("%s is not YAML with one constant a line: %w", path, err)
	}
	known := routing.ConfigFields()
	var wrong []error
	for name, value := range given {
		if !slices.Contains(known, name) {
			wrong = append(wrong, fmt.Errorf("there is no %q; there are %s", name, strings.Join(known, ", ")))
			continue
		}
		field, err := json.Marshal(map[string]any{name: value})
		if err == nil {
			err = strictjson.UnmarshalKnown(field, &c)
		}
		if err != nil {
			wrong = append(wrong, fmt.Errorf("%s is %v, which it cannot be: %w", name, value, err))
		}
	}
	if err := errors.Join(wrong...); err != nil {
		return c, err
	}
	return c, c.Validate()
}

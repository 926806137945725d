package launch

import (
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// ReadRouting reads the constants of a choice from a YAML or JSON file. A missing constant has the default. An empty
// path means no file.
func ReadRouting(path string) (routing.Config, error) {
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
		return c, fmt.Errorf("%s is not YAML with a constant per line: %w", path, err)
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
			wrong = append(wrong, fmt.Errorf("%s is %v, an invalid value: %w", name, value, err))
		}
	}
	if err := errors.Join(wrong...); err != nil {
		return c, err
	}
	return c, c.Validate()
}

// readL3Config reads a file with {"MODEL": {"sglang_hicache_mooncake": {...}}, ...}. passed has the unknown fields, by
// model.
func readL3Config(path string) (models map[string]hicache.Config, passed map[string]hicache.Passed, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, err
	}
	if models, passed, err = hicache.ParseModels(data); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return models, passed, nil
}

// readAuthorities reads certificates of authorities from a PEM file.
func readAuthorities(path string) (*x509.CertPool, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s has no certificate in PEM", path)
	}
	return pool, nil
}

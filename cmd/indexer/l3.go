package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// readL3Config reads {"MODEL": {"sglang_hicache_mooncake": {...}}, ...} and refuses what makes no sense, all of it at
// once.
func readL3Config(path string) (map[string]hicache.Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	models := map[string]hicache.Config{}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&models); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	var errs []error
	for model, c := range models {
		if err := c.Check(); err != nil {
			errs = append(errs, fmt.Errorf("%s: model %q: %w", path, model, err))
		}
	}
	return models, errors.Join(errs...)
}

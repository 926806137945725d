package main

import (
	"fmt"
	"os"

	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// readL3Config reads {"MODEL": {"sglang_hicache_mooncake": {...}}, ...}.
func readL3Config(path string) (map[string]hicache.Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	models, err := hicache.ParseModels(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return models, nil
}

package main

import (
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// readL3Config reads {"MODEL": {"sglang_hicache_mooncake": {...}}, ...}.
// passed has the unknown fields of each model.
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

// warnPassed logs the unknown fields of --l3-config.
func (s *serving) warnPassed(log *slog.Logger) {
	for _, model := range slices.Sorted(maps.Keys(s.l3Passed)) {
		log.Warn("unknown fields of --l3-config are ignored", "model", model, "fields", s.l3Passed[model],
			"what_to_do", hicache.PassedRemedy)
	}
}

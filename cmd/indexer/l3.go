package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
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

// listenStore hears what a store's shim passes on, until ctx ends. Where that cannot be heard the store is polled.
func listenStore(ctx context.Context, ns *jetstream.Namespace, store string, heard func([]byte), log *slog.Logger) {
	subject, err := jetstream.StoreSubject(ns.Name(), store)
	if err == nil {
		err = ns.Conn().Listen(ctx, subject, heard)
	}
	if ctx.Err() == nil {
		log.Warn("the shared store's events cannot be heard; it is polled", "store", store, "error", err, "what_to_do",
			"grant it to this user: indexer auth example prints what each user needs")
	}
}

package dynamo

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// Card contains the facts of a worker's model deployment card. The zero value is a worker without a card.
type Card struct {
	Role          string // aggregated, prefill, decode or encode; empty: unknown
	BootstrapPort uint32 // of a prefill worker of SGLang; 0: none

	TotalKVBlocks    uint64 // the device memory of a rank, in blocks; 0: unknown
	MaxBatchedTokens uint64 // bound on the tokens that a rank computes in a step; 0: unknown
}

// modelRecord is a record of v1/mdc. An adapter of a worker has a record of its own.
type modelRecord struct {
	ID   uint64 `json:"instance_id"`
	Card struct {
		WorkerType *string `json:"worker_type"` // since 1.5
		ModelType  *string `json:"model_type"`  // kinds of requests, joined by " | "

		Config struct {
			TotalKVBlocks    *uint64 `json:"total_kv_blocks"`
			MaxBatchedTokens *uint64 `json:"max_num_batched_tokens"`
			Disaggregated    *struct {
				BootstrapPort *uint32 `json:"bootstrap_port"`
			} `json:"disaggregated_endpoint"`
		} `json:"runtime_config"`
	} `json:"card_json"`
}

// roles are the types of workers in cards.
var roles = []string{"aggregated", "prefill", "decode", "encode"}

// cards decodes the records of v1/mdc, by worker. It skips unreadable records.
func cards(list []record) (of map[uint64]Card, wrong []error) {
	of = map[uint64]Card{}
	slices.SortFunc(list, func(a, b record) int { return strings.Compare(a.name, b.name) })
	for _, r := range list {
		var m modelRecord
		if err := strictjson.Unmarshal(r.text, &m); err != nil {
			wrong = append(wrong, fmt.Errorf("%s: %w", r.name, err))
			continue
		}
		if _, there := of[m.ID]; !there {
			of[m.ID] = m.card()
		}
	}
	return of, wrong
}

func (m *modelRecord) card() Card {
	config := &m.Card.Config
	c := Card{TotalKVBlocks: valueOf(config.TotalKVBlocks), MaxBatchedTokens: valueOf(config.MaxBatchedTokens)}
	if role := valueOf(m.Card.WorkerType); slices.Contains(roles, role) {
		c.Role = role
	} else if valueOf(m.Card.ModelType) == "Prefill" { // of old releases
		c.Role = "prefill"
	}
	if c.Role == "prefill" && config.Disaggregated != nil {
		c.BootstrapPort = valueOf(config.Disaggregated.BootstrapPort)
	}
	return c
}

func valueOf[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

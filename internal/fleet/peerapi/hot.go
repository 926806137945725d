package peerapi

import (
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// HotPartBlocks bounds the hashes of blocks in a node's part of a list.
const HotPartBlocks = 1 << 15

// HotPart is a node's part of a HotList.
type HotPart struct {
	BlockSize uint32           `json:"block_size" msgpack:"block_size"`
	Disabled  bool             `json:"disabled,omitempty" msgpack:"disabled,omitempty"`
	Prefixes  []HotCounts      `json:"prefixes" msgpack:"prefixes"`
	Copies    []api.PrefixCopy `json:"copies" msgpack:"copies"`
}

// HotCounts are the counts of a prefix on a node.
type HotCounts struct {
	Hash   events.SeqHash `json:"hash" msgpack:"hash"`
	Above  events.SeqHash `json:"above,omitempty" msgpack:"above,omitempty"` // the next shorter counted prefix
	Blocks uint32         `json:"blocks" msgpack:"blocks"`
	Locals api.Hashes     `json:"hashes,omitempty" msgpack:"hashes,omitempty"` // local hashes; empty: not kept
	Kept   bool           `json:"tokens_kept,omitempty" msgpack:"tokens_kept,omitempty"`

	// Per second: requests, recomputed tokens, milliseconds of waiting, and milliseconds that a copy saves.
	Requests   float64 `json:"requests_per_s" msgpack:"requests_per_s"`
	Recomputed float64 `json:"recomputed_tokens_per_s" msgpack:"recomputed_tokens_per_s"`
	Waited     float64 `json:"waited_ms_per_s" msgpack:"waited_ms_per_s"`
	Saves      float64 `json:"saves_ms_per_s" msgpack:"saves_ms_per_s"`

	Helped float64 `json:"helped_requests" msgpack:"helped_requests"` // recent requests
}

// CopyNote is the message of a node to the other nodes after a copy, so that they count the use of the copy.
type CopyNote struct {
	Model     string          `json:"model" msgpack:"model"`
	Hash      string          `json:"hash" msgpack:"hash"`
	Blocks    uint32          `json:"blocks" msgpack:"blocks"`
	Before    uint32          `json:"before,omitempty" msgpack:"before,omitempty"` // blocks that the worker held
	Worker    events.WorkerID `json:"worker" msgpack:"worker"`
	Rank      events.Rank     `json:"rank,omitempty" msgpack:"rank,omitempty"`
	AtMS      uint64          `json:"at_ms" msgpack:"at_ms"` // of the answer, in milliseconds since 1970
	TookMS    float64         `json:"took_ms" msgpack:"took_ms"`
	Automatic bool            `json:"automatic,omitempty" msgpack:"automatic,omitempty"`
}

// Check returns an error for an invalid note. The error is an [api.Error].
func (r *CopyNote) Check() error {
	if _, err := api.ParsePrefixHash(r.Hash); err != nil {
		return err
	}
	if r.Blocks == 0 || r.Before > r.Blocks || r.Worker == "" {
		return api.Errorf(api.CodeMalformed, "a copy has a worker and at least one block, and before is at most blocks")
	}
	return checkModel(r.Model)
}

package events

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// EngineLoad is how full a rank is, as its engine says, or as a router of another make counts what it has sent there.
// What is not said is nil.
type EngineLoad struct {
	Worker WorkerID `json:"worker" msgpack:"worker"`
	Rank   Rank     `json:"rank" msgpack:"rank"`

	UsedBlocks  *uint64 `json:"kv_used_blocks,omitempty" msgpack:"kv_used_blocks,omitempty"`   // the engine says
	TotalBlocks *uint64 `json:"kv_total_blocks,omitempty" msgpack:"kv_total_blocks,omitempty"` // the engine's capacity

	DecodeBlocks  *uint64 `json:"active_decode_blocks,omitempty" msgpack:"active_decode_blocks,omitempty"`   // a router says
	PrefillTokens *uint64 `json:"active_prefill_tokens,omitempty" msgpack:"active_prefill_tokens,omitempty"` // a router says

	AgeMS uint64 `json:"age_ms,omitempty" msgpack:"age_ms,omitempty"` // how long ago it was said, in milliseconds
}

// Check refuses a load that says nothing, or of nobody.
func (l *EngineLoad) Check() error {
	switch {
	case l.Worker == "":
		return errors.New("worker is missing")
	case l.UsedBlocks == nil && l.TotalBlocks == nil && l.DecodeBlocks == nil && l.PrefillTokens == nil:
		return errors.New("it says neither used nor active blocks, nor tokens")
	}
	return nil
}

// MaxEngineCount bounds each number of an [EngineLoad].
const MaxEngineCount = 1 << 53

// dynamoLoad has the fields of all forms. What we have no use for is not listed; Dynamo's own readers pass over it too.
type dynamoLoad struct {
	Worker json.RawMessage `json:"worker_id"`
	Rank   *uint32         `json:"dp_rank"`

	Decode  *uint64 `json:"active_decode_blocks"`
	Prefill *uint64 `json:"active_prefill_tokens"`
	Used    *uint64 `json:"kv_used_blocks"`

	forwardPass
	Data *struct {
		forwardPass
		Worker *struct {
			Rank *uint32 `json:"data_parallel_rank"`
		} `json:"worker_stats"`
		KV *forwardPass `json:"kv_stats"`
	} `json:"data"`
}

// forwardPass is what counts of the older ForwardPassMetrics, whose other five fields are of slots and rates.
type forwardPass struct {
	Active *uint64 `json:"kv_active_blocks"`
	Total  *uint64 `json:"kv_total_blocks"`
}

// ReadDynamoLoad reads what Dynamo's workers and routers publish on the subject kv_metrics (ai-dynamo/dynamo ›
// lib/kv-router, protocols), of any release, as JSON, as MessagePack, or in the envelope that events have:
//
//	{"worker_id":7,"dp_rank":0,"active_decode_blocks":1,"active_prefill_tokens":2,"kv_used_blocks":3}  ActiveLoad
//	{"worker_id":7,"data":{"worker_stats":{"data_parallel_rank":0},"kv_stats":{"kv_active_blocks":3,"kv_total_blocks":9}}}
//	{"worker_id":7,"data":{"kv_active_blocks":3,"kv_total_blocks":9}}  and the five others of ForwardPassMetrics
//	{"worker_id":7,"kv_active_blocks":3,"kv_total_blocks":9}           the same without a frame
//
// The envelope may hold a list. yield is called with each load, in order; an error says that the rest cannot be read.
func ReadDynamoLoad(data []byte, yield func(EngineLoad)) error {
	if len(data) > maxPayload {
		return malformed(0, "a Dynamo message of %d bytes: at most %d", len(data), maxPayload)
	}
	if trimmed := bytes.TrimLeft(data, " \t\r\n"); len(trimmed) > 0 && trimmed[0] == '{' {
		l, err := readDynamoLoad(trimmed)
		if err == nil {
			yield(l)
		}
		return err
	}
	return eachOfEnvelope(data, "load", func(line []byte) error {
		l, err := readDynamoLoad(line)
		if err == nil {
			yield(l)
		}
		return err
	})
}

// eachOfEnvelope calls do with each element of what the envelope EventEnvelope holds, or data itself if it is none, in
// JSON.
func eachOfEnvelope(data []byte, what string, do func(line []byte) error) error {
	r := &msgp.Reader{Data: data}
	payload, found := data, false
	if err := each(r, func(key string) bool {
		if key != "payload" {
			return r.Skip()
		}
		at, ok := r.At, false
		if payload, ok = r.Bin(); !ok { // an array of bytes, as serde writes without its bytes type
			r.At = at
			payload, ok = byteArray(r)
		}
		found = ok
		return ok
	}); err != nil {
		return err
	}
	if !found { // no envelope
		payload = data
	}
	r = &msgp.Reader{Data: payload}
	n, ok := r.Array()
	if !ok {
		n = 1
	}
	var line []byte
	for i := range n {
		line = appendJSON(line[:0], r, maxRouterNesting)
		if r.Broken {
			return malformed(r.At, "%s %d of %d: cut off, or not of maps with names", what, i, n)
		}
		if err := do(line); err != nil {
			return fmt.Errorf("%s %d of %d: %w", what, i, n, err)
		}
	}
	return nil
}

func readDynamoLoad(line []byte) (EngineLoad, error) {
	var d dynamoLoad
	if err := strictjson.Unmarshal(line, &d); err != nil {
		return EngineLoad{}, err
	}
	if d.Worker == nil {
		return EngineLoad{}, errors.New("worker_id is missing")
	}
	l := EngineLoad{UsedBlocks: d.Used, DecodeBlocks: d.Decode, PrefillTokens: d.Prefill}
	older := []*forwardPass{&d.forwardPass}
	rank := d.Rank
	if data := d.Data; data != nil {
		older = append(older, &data.forwardPass, data.KV)
		if data.Worker != nil && data.Worker.Rank != nil {
			rank = data.Worker.Rank
		}
	}
	if rank != nil {
		l.Rank = Rank(*rank)
	}
	for _, f := range older {
		if f != nil && f.Active != nil && l.UsedBlocks == nil {
			l.UsedBlocks = f.Active
		}
		if f != nil && f.Total != nil && *f.Total > 0 { // 0 is what an engine says that does not know
			l.TotalBlocks = f.Total
		}
	}
	for _, v := range []*uint64{l.UsedBlocks, l.TotalBlocks, l.DecodeBlocks, l.PrefillTokens} {
		if v != nil && *v > MaxEngineCount {
			return l, fmt.Errorf("%d is no number of blocks or tokens", *v)
		}
	}
	var err error
	if l.Worker, err = routerWorker(d.Worker); err != nil {
		return l, err
	}
	return l, l.Check()
}

package events

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// EngineLoad is the load of a rank, from reports of the engine or from the requests of another router. Unknown values
// are nil.
type EngineLoad struct {
	Worker WorkerID `json:"worker" msgpack:"worker"`
	Rank   Rank     `json:"rank" msgpack:"rank"`

	UsedBlocks  *uint64 `json:"kv_used_blocks,omitempty" msgpack:"kv_used_blocks,omitempty"`   // from the engine
	TotalBlocks *uint64 `json:"kv_total_blocks,omitempty" msgpack:"kv_total_blocks,omitempty"` // the engine's capacity

	DecodeBlocks  *uint64 `json:"active_decode_blocks,omitempty" msgpack:"active_decode_blocks,omitempty"`   // from a router
	PrefillTokens *uint64 `json:"active_prefill_tokens,omitempty" msgpack:"active_prefill_tokens,omitempty"` // from a router

	// From the engine: its requests, and the tokens to compute for waiting requests.
	Running       *uint64 `json:"num_requests_running,omitempty" msgpack:"num_requests_running,omitempty"`
	Waiting       *uint64 `json:"num_requests_waiting,omitempty" msgpack:"num_requests_waiting,omitempty"`
	WaitingTokens *uint64 `json:"num_waiting_tokens,omitempty" msgpack:"num_waiting_tokens,omitempty"`

	// Source describes the sender, such as vllm; for people. At most 64 bytes.
	Source string `json:"source,omitempty" msgpack:"source,omitempty"`

	AgeMS uint64 `json:"age_ms,omitempty" msgpack:"age_ms,omitempty"` // the age of the report in milliseconds
}

// Check returns an error for a load without a worker or without values.
func (l *EngineLoad) Check() error {
	switch {
	case l.Worker == "":
		return errors.New("worker is missing")
	case l.UsedBlocks == nil && l.TotalBlocks == nil && l.DecodeBlocks == nil && l.PrefillTokens == nil &&
		l.Running == nil:
		return errors.New("used blocks, active blocks, tokens and running requests are all missing")
	case len(l.Source) > maxSource:
		return fmt.Errorf("source has %d bytes, more than %d", len(l.Source), maxSource)
	}
	return nil
}

// maxSource bounds the source of an [EngineLoad], in bytes.
const maxSource = 64

// MaxEngineCount bounds each number of an [EngineLoad].
const MaxEngineCount = 1 << 53

// dynamoLoad has the used fields of all forms. Other fields are ignored, as Dynamo's own readers do.
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

// forwardPass has the used fields of the older ForwardPassMetrics. The five unused fields concern slots and rates.
type forwardPass struct {
	Active *uint64 `json:"kv_active_blocks"`
	Total  *uint64 `json:"kv_total_blocks"`
}

// ReadDynamoLoad reads a message of Dynamo's workers and routers on the subject kv_metrics (ai-dynamo/dynamo ›
// lib/kv-router, protocols). It accepts the form of any release, as JSON, as MessagePack, or in the envelope of events:
//
//	{"worker_id":7,"dp_rank":0,"active_decode_blocks":1,"active_prefill_tokens":2,"kv_used_blocks":3}  ActiveLoad
//	{"worker_id":7,"data":{"worker_stats":{"data_parallel_rank":0},"kv_stats":{"kv_active_blocks":3,"kv_total_blocks":9}}}
//	{"worker_id":7,"data":{"kv_active_blocks":3,"kv_total_blocks":9}}  and the five others of ForwardPassMetrics
//	{"worker_id":7,"kv_active_blocks":3,"kv_total_blocks":9}           the same without a frame
//
// The envelope may contain a list. yield receives each load, in order. After an error, the rest is not read.
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

// eachOfEnvelope calls do with the JSON of each element of an EventEnvelope's payload. Without an envelope, data itself
// is the payload.
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
			return malformed(r.At, "%s %d of %d: truncated, or not of maps with names", what, i, n)
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
		if f != nil && f.Total != nil && *f.Total > 0 { // engines report 0 for an unknown number
			l.TotalBlocks = f.Total
		}
	}
	for _, v := range []*uint64{l.UsedBlocks, l.TotalBlocks, l.DecodeBlocks, l.PrefillTokens} {
		if v != nil && *v > MaxEngineCount {
			return l, fmt.Errorf("%d is above the maximum of %d blocks or tokens", *v, uint64(MaxEngineCount))
		}
	}
	var err error
	if l.Worker, err = routerWorker(d.Worker); err != nil {
		return l, err
	}
	return l, l.Check()
}

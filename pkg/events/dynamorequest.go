package events

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// RequestChange is a step in the life of a request that a router sent to a worker.
type RequestChange string

// The changes of a request. A router reports the beginning and the end of every request, and the progress of the
// prefill.
const (
	RequestAdded      RequestChange = "added"      // the router sent it to the worker
	RequestPrefilling RequestChange = "prefilling" // the worker has PrefillTokens to compute for it
	RequestPrefilled  RequestChange = "prefilled"  // the worker has computed its prompt
	RequestFreed      RequestChange = "freed"      // the request ended
)

// RouterRequest is one change of a request, as reported by the sending router.
type RouterRequest struct {
	Key           RankKey
	ID            string
	Change        RequestChange
	Blocks        []SeqHash // of the prompt's whole blocks; of RequestAdded
	PrefillTokens uint64    // tokens to compute; of RequestAdded and RequestPrefilling
}

// dynamoRequest has the fields of Dynamo's ActiveSequenceEvent, ActiveSequenceEventBatch and PrefillEvent. Fields that
// are not listed are ignored, as Dynamo's own readers do.
type dynamoRequest struct {
	Events []json.RawMessage `json:"events"`

	ID     *string         `json:"request_id"`
	Worker json.RawMessage `json:"worker_id"`
	At     *struct {
		Worker json.RawMessage `json:"worker_id"`
		Rank   uint32          `json:"dp_rank"`
	} `json:"worker"`
	Data json.RawMessage `json:"data"`
}

// dynamoChange is the data of a request's event in object form. Exactly one field is set.
type dynamoChange struct {
	Add *struct {
		Blocks []routerHash `json:"token_sequence"`
		Track  *bool        `json:"track_prefill_tokens"`
		Hint   *struct {
			Tokens uint64 `json:"initial_effective_prefill_tokens"`
		} `json:"prefill_load_hint"`
		Length  uint64 `json:"isl"`     // until 1.0
		Overlap uint64 `json:"overlap"` // cached blocks, until 1.0
	} `json:"AddRequest"`
	New    *uint64 `json:"NewPrefill"`
	Update *uint64 `json:"UpdatePrefill"`
}

// ReadDynamoRequests reads messages that Dynamo's routers publish on active_sequences_events and prefill_events
// (ai-dynamo/dynamo › lib/kv-router/src/protocols.rs), of any release, as JSON, as MessagePack, or in the envelope that
// events have:
//
//	{"request_id":"r","worker":{"worker_id":7,"dp_rank":0},"router_id":1,"lora_name":null,"data":{"AddRequest":
//	  {"token_sequence":[1,2],"track_prefill_tokens":true,"prefill_load_hint":{"initial_effective_prefill_tokens":9}}}}
//	the same with "data":"MarkPrefillCompleted" or "data":"Free"
//	the same with "data":{"AddRequest":{"token_sequence":[1,2],"isl":40,"overlap":1}}    releases up to 1.0
//	{"request_id":"r","worker_id":7,"data":{"NewPrefill":9},"router_id":1}               also UpdatePrefill
//	the same with "data":"CompletePrefill"
//	{"events":[…]}                                                                       a batch, over ZeroMQ
//
// blockSize converts the older form's cached blocks to tokens. ReadDynamoRequests calls yield with each change, in
// order. After an error the rest of the message is not read.
func ReadDynamoRequests(data []byte, blockSize uint32, yield func(RouterRequest)) error {
	if len(data) > maxPayload {
		return malformed(0, "a Dynamo message of %d bytes: at most %d", len(data), maxPayload)
	}
	read := func(line []byte) error { return readDynamoRequest(line, blockSize, true, yield) }
	if trimmed := bytes.TrimLeft(data, " \t\r\n"); len(trimmed) > 0 && trimmed[0] == '{' {
		return read(trimmed)
	}
	return eachOfEnvelope(data, "request", read)
}

func readDynamoRequest(line []byte, blockSize uint32, mayBeBatch bool, yield func(RouterRequest)) error {
	var d dynamoRequest
	if err := strictjson.Unmarshal(line, &d); err != nil {
		return err
	}
	if d.Events != nil && mayBeBatch {
		for i, e := range d.Events {
			if err := readDynamoRequest(e, blockSize, false, yield); err != nil {
				return fmt.Errorf("event %d of %d: %w", i+1, len(d.Events), err)
			}
		}
		return nil
	}
	r := RouterRequest{}
	worker := d.Worker
	if d.At != nil {
		worker, r.Key.Rank = d.At.Worker, Rank(d.At.Rank)
	}
	switch {
	case d.ID == nil || *d.ID == "":
		return errors.New("request_id is missing")
	case worker == nil || string(worker) == "null":
		return errors.New("worker_id is missing")
	case d.Data == nil:
		return errors.New("data is missing")
	}
	r.ID = *d.ID
	var err error
	if r.Key.Instance, err = routerWorker(worker); err != nil {
		return err
	}
	if err := r.readData(d.Data, blockSize); err != nil {
		return err
	}
	if r.PrefillTokens > MaxEngineCount {
		return fmt.Errorf("%d is above the maximum of %d tokens", r.PrefillTokens, uint64(MaxEngineCount))
	}
	yield(r)
	return nil
}

// readData reads the field data: a name alone, or an object with the change's name.
func (r *RouterRequest) readData(data json.RawMessage, blockSize uint32) error {
	if data[0] == '"' {
		var name string
		if err := strictjson.Unmarshal(data, &name); err != nil {
			return err
		}
		r.Change = map[string]RequestChange{"Free": RequestFreed, "MarkPrefillCompleted": RequestPrefilled,
			"CompletePrefill": RequestPrefilled}[name]
		if r.Change == "" {
			return fmt.Errorf("unknown change %.64q", name)
		}
		return nil
	}
	var c dynamoChange
	if err := strictjson.Unmarshal(data, &c); err != nil {
		return err
	}
	switch {
	case c.Add != nil:
		r.Change = RequestAdded
		for _, h := range c.Add.Blocks {
			r.Blocks = append(r.Blocks, SeqHash(h))
		}
		cached := c.Add.Overlap * uint64(blockSize)
		switch {
		case c.Add.Track != nil && !*c.Add.Track:
		case c.Add.Hint != nil:
			r.PrefillTokens = c.Add.Hint.Tokens
		case c.Add.Overlap <= c.Add.Length && cached < c.Add.Length:
			r.PrefillTokens = c.Add.Length - cached
		}
	case c.New != nil:
		r.Change, r.PrefillTokens = RequestPrefilling, *c.New
	case c.Update != nil:
		r.Change, r.PrefillTokens = RequestPrefilling, *c.Update
	default:
		return errors.New("data has none of AddRequest, NewPrefill and UpdatePrefill")
	}
	return nil
}

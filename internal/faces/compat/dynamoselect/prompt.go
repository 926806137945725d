package dynamoselect

import (
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// prompt has the fields of a request that describe a prompt.
type prompt struct {
	key

	tokens       api.Tokens
	routing      *mediaPrompt
	media        []*media
	hashes, seqs api.Hashes
	isl          *uint64
	lora, salt   string
	eagle        *bool
	overrides    overrides
}

func (p *prompt) members() []compat.Field {
	p.key = key{defaultModel, defaultGroup}
	return []compat.Field{
		member("model_name", &p.model, defaulted, "text"),
		member("routing_group", &p.group, defaulted, "text"),
		member("token_ids", &p.tokens, optional, "a list of unsigned 32-bit numbers"),
		member("mm_routing_info", &p.routing, optional, "an object with routing_token_ids"),
		member("block_mm_infos", &p.media, optional, "a list with null or the mm_objects of each block"),
		member("block_hashes", &p.hashes, optional, "a list of 64-bit numbers"),
		member("sequence_hashes", &p.seqs, optional, "a list of 64-bit numbers"),
		member("isl_tokens", &p.isl, optional, "a number of tokens"),
		member("lora_name", &p.lora, optional, "text"),
		member("cache_salt", &p.salt, optional, "text"),
		member("is_eagle", &p.eagle, optional, "true or false"),
		member("router_config_override", &p.overrides, optional, "an object with settings in their ranges"),
	}
}

// mediaPrompt is a prompt with multimodal items.
type mediaPrompt struct {
	Tokens api.Tokens
	Media  []*media
}

func (m *mediaPrompt) UnmarshalJSON(data []byte) error {
	return object(data, member("routing_token_ids", &m.Tokens, required, "a list of tokens"),
		member("block_mm_infos", &m.Media, defaulted, "a list"))
}

// media are the multimodal items of a block.
type media struct{ items []events.BlockMedia }

func (m *media) UnmarshalJSON(data []byte) error {
	var items []mediaItem
	err := object(data, member("mm_objects", &items, required, "a list"))
	objects := make([]compat.MediaObject, len(items))
	for i, item := range items {
		objects[i] = compat.MediaObject(item)
	}
	m.items = compat.BlockMedia(objects)
	return err
}

type mediaItem compat.MediaObject

func (m *mediaItem) UnmarshalJSON(data []byte) error {
	return object(data, member("mm_hash", &m.Hash, required, "a 64-bit number"),
		member("offsets", new(json.RawMessage), defaulted, "a list"))
}

// object reads a JSON object from the value of a field.
func object(data []byte, list ...compat.Field) error {
	f, err := members(data)
	if err == nil {
		err = f.Read(&words, list...)
	}
	return err
}

// overrides reads routing.Overrides as Dynamo does. A value out of range is an invalid type.
type overrides struct{ routing.Overrides }

func (o *overrides) UnmarshalJSON(data []byte) error {
	err := object(data,
		member("overlap_score_credit", &o.OverlapScoreCredit, optional, "a number"),
		member("prefill_load_scale", &o.PrefillLoadScale, optional, "a number"),
		member("overlap_score_weight", &o.OverlapScoreWeight, optional, "a number"),
		member("router_temperature", &o.RouterTemperature, optional, "a number"),
		member("assume_kv_reuse", &o.AssumeKVReuse, optional, "true or false"),
		member("track_prefill_tokens", &o.TrackPrefillTokens, optional, "true or false"),
		member("shared_cache_multiplier", &o.SharedCacheMultiplier, optional, "a number"))
	if err == nil {
		err = o.Validate()
	}
	return err
}

// convert returns the prompt in kvatlas's form for a model with the given block size.
func (p *prompt) convert(blockSize uint32) (api.Prompt, error) {
	tokens, items := p.tokens, p.media
	if p.routing != nil && len(p.routing.Tokens) > 0 {
		tokens, items = p.routing.Tokens, p.routing.Media
	}
	out := api.Prompt{Model: p.name(), BlockSize: blockSize}
	if tokens == nil {
		return out, p.hashed(&out, blockSize)
	}
	out.LoRA, out.CacheSalt = p.lora, p.salt
	var objects [][]events.BlockMedia
	for i, m := range items {
		if m != nil && len(m.items) > 0 {
			objects = append(objects, make([][]events.BlockMedia, i+1-len(objects))...)
			objects[i] = m.items
		}
	}
	if objects == nil {
		out.Tokens = tokens
		return out, nil
	}
	hasher, err := events.NewHasher(blockSize, events.Space{LoRA: p.lora, Salt: p.salt})
	if err != nil {
		return out, err
	}
	out.LoRA, out.CacheSalt = "", ""
	out.Hashes, out.ISLTokens = api.Hashes{}, uint64(len(tokens))
	for _, h := range hasher.HashMedia(nil, tokens, objects) {
		out.Hashes = append(out.Hashes, uint64(h))
	}
	return out, nil
}

// hashed converts a prompt without tokens.
func (p *prompt) hashed(out *api.Prompt, blockSize uint32) error {
	bad := func(format string, args ...any) error { return fail(http.StatusBadRequest, format, args...) }
	switch {
	case p.hashes == nil:
		return bad("block_hashes is required without token_ids")
	case p.seqs == nil:
		return bad("sequence_hashes is required without token_ids")
	case p.isl == nil:
		return bad("isl_tokens is required without token_ids")
	case *p.isl == 0:
		return bad("isl_tokens must be greater than 0")
	case len(p.hashes) != len(p.seqs):
		return bad("block_hashes length %d must match sequence_hashes length %d", len(p.hashes), len(p.seqs))
	}
	out.Hashes, out.SequenceHashes, out.ISLTokens = p.hashes, p.seqs, *p.isl
	p.overrides.AssumeKVReuse = nil // the sender of hashes decides which blocks requests share
	return p.tooShort(blockSize)
}

// tooShort refuses a prompt with fewer tokens than the whole blocks have.
func (p *prompt) tooShort(blockSize uint32) error {
	if whole := uint64(len(p.seqs)) * uint64(blockSize); *p.isl < whole {
		return fail(http.StatusBadRequest, "isl_tokens is %d; %d whole blocks of %d tokens have %d", *p.isl, len(p.seqs),
			blockSize, whole)
	}
	if *p.isl > api.MaxISL {
		return fail(http.StatusBadRequest, "isl_tokens is %d, more than %d", *p.isl, uint64(api.MaxISL))
	}
	return nil
}

// target is a worker. A rank that is not nil selects a single rank of the worker.
type target struct {
	id   id
	rank *events.Rank
}

func (t *target) UnmarshalJSON(data []byte) error {
	return object(data, member("worker_id", &t.id, required, "a worker's number"),
		member("dp_rank", &t.rank, optional, "an unsigned 32-bit number"))
}

func (t *target) routing() *routing.Target {
	if t == nil {
		return nil
	}
	return &routing.Target{Worker: events.WorkerID(t.id), Rank: t.rank}
}

// pin is a target with a required rank.
type pin struct{ target }

func (p *pin) UnmarshalJSON(data []byte) error {
	p.rank = new(events.Rank)
	return object(data, member("worker_id", &p.id, required, "a worker's number"),
		member("dp_rank", p.rank, required, "an unsigned 32-bit number"))
}

// constraints are required taints and the weights of preferred taints.
type constraints struct {
	required  []string
	preferred map[string]float64
}

func (c *constraints) UnmarshalJSON(data []byte) error {
	return object(data, member("required_taints", &c.required, defaulted, "a list of text"),
		member("preferred_taints", &c.preferred, defaulted, "an object with a number for each taint"))
}

// session is the session of a request.
type session struct{ id string }

func (s *session) UnmarshalJSON(data []byte) error {
	var parent *string
	var final *bool
	var trigger *string
	err := object(data, member("session_id", &s.id, required, "text"),
		member("parent_session_id", &parent, optional, "text"), member("session_final", &final, optional, "true or false"),
		member("input_trigger", &trigger, optional, "text"))
	if err == nil && trigger != nil && *trigger != "user_message" && *trigger != "tool_result" && *trigger != "other" {
		err = fmt.Errorf("input_trigger is %.40q", *trigger)
	}
	return err
}

package api

import (
	"math"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// member is a member of an object in a request: the name, and the destination of the value. The type of *to decides
// which values are valid.
type member struct {
	name string
	to   any
}

// object is a request, or a part of a request, with members. The method appends its members to a list.
type object interface {
	members(list []member) []member
}

// Types for values with a narrower range than their destinations.
type (
	positiveNumber uint32           // not 0
	tokenCount     uint64           // of a prompt
	knownCount     uint64           // from 1 to 2^53: the number must be known
	mediaHash      uint64           // a number, or the identifier to hash
	nonEmptyText   string           // not empty
	promptText     string           // with advice for clients that send a list
	objectValue    Value            // a Value is a list
	textMember     struct{ *Query } // a member of Text, which is created at the first member
)

// into reads the value of a field into *to. field is empty for the element or body itself. The type of *to decides
// which values are valid.
func (r *reader) into(field string, to any) (err error) {
	switch to := to.(type) {
	case *string, *nonEmptyText, *promptText, *Tiers, *events.WorkerID, *Role, *routing.Role:
		return r.intoText(field, to)
	case *int, *uint32, *positiveNumber, *events.Rank, **events.Rank, *events.Partition, *events.StreamSeq, *uint64,
		*tokenCount, *knownCount, **uint64, *float64, **float64, *mediaHash:
		return r.intoNumber(field, to)
	case *[]string, *[]Tiers, *[]events.WorkerID, *[]events.Partition, *[]Hashed, *[]RankPlace, *[]PartitionSeq,
		*[]events.MediaItem, *[]EngineLoad, *[]QuietSource, *[]RouterRequest, *[]WorkerResult:
		return r.intoList(field, to)
	case *bool:
		return r.bool(field, to)
	case **bool:
		*to = new(bool)
		return r.bool(field, *to)
	case *Tokens:
		return r.readTokens(field, to)
	case *Hashes:
		return r.readHashes(field, to)
	case *Value:
		return r.value(field, kindList, to)
	case *objectValue:
		return r.value(field, kindObject, (*Value)(to))
	case *map[string]string:
		return readMap(r, field, "an object", to)
	case *map[string]float64:
		return readMap(r, field, "an object that has a weight for each taint", to)
	}
	return r.intoObject(field, to)
}

// intoText reads a text.
func (r *reader) intoText(field string, to any) error {
	switch to := to.(type) {
	case *nonEmptyText:
		return r.nonEmpty(field, (*string)(to))
	case *promptText:
		if r.kind() == kindList {
			return Errorf(CodeMalformed, "%s is a list; send token ids as tokens, and one text only", r.name(field))
		}
		return r.string(field, (*string)(to))
	case *Tiers:
		return r.string(field, (*string)(to))
	case *events.WorkerID:
		return r.string(field, (*string)(to))
	case *Role:
		if r.kind() == kindList {
			return Errorf(CodeMalformed, "%s is a list; a worker has one role of %v", r.name(field), roles)
		}
		return r.nonEmpty(field, (*string)(to))
	case *routing.Role:
		if r.kind() != kindText {
			return r.isNot(field, "one of aggregated, prefill and decode")
		}
		return r.string(field, (*string)(to))
	}
	return r.string(field, to.(*string))
}

// intoNumber reads a number. A 64-bit number may be text, and so may the hash of a media item.
func (r *reader) intoNumber(field string, to any) (err error) {
	var v uint64
	switch to := to.(type) {
	case *int:
		v, err = r.uint(field, "a number of workers", 1<<31-1)
		*to = int(v)
	case *uint32:
		err = r.uint32(field, to)
	case *positiveNumber:
		err = r.positive(field, (*uint32)(to))
	case *events.Rank:
		err = r.uint32(field, (*uint32)(to))
	case **events.Rank:
		*to = new(events.Rank)
		err = r.uint32(field, (*uint32)(*to))
	case *events.Partition:
		err = r.uint32(field, (*uint32)(to))
	case *events.StreamSeq:
		err = r.uint64(field, (*uint64)(to))
	case *uint64:
		err = r.uint64(field, to)
	case *tokenCount:
		v, err = r.uint(field, "a number of tokens", math.MaxInt64)
		*to = tokenCount(v)
	case *knownCount:
		v, err = r.uint(field, "a whole number from 1 to 2^53", 1<<53)
		if err == nil && v == 0 {
			return Errorf(CodeMalformed, "%s is 0; omit it if unknown", r.name(field))
		}
		*to = knownCount(v)
	case **uint64:
		v, err = r.uint(field, "a number of blocks or tokens", events.MaxEngineCount)
		if err == nil && *to != nil {
			return Errorf(CodeMalformed, "%s repeats kv_used_blocks; give one of them", r.name(field))
		}
		*to = &v
	case *float64:
		*to, err = r.float(field)
	case **float64:
		*to = new(float64)
		**to, err = r.float(field)
	case *mediaHash:
		if r.kind() == kindText {
			var identifier string
			err = r.nonEmpty(field, &identifier)
			*to = mediaHash(events.MediaHash(identifier))
			return err
		}
		v, err = r.uint(field, "the identifier that the engine gives the item, or an unsigned 64-bit number", 1<<64-1)
		*to = mediaHash(v)
	}
	return err
}

// intoList reads a list.
func (r *reader) intoList(field string, to any) error {
	switch to := to.(type) {
	case *[]Tiers:
		return readList(r, field, to, math.MaxInt)
	case *[]events.WorkerID:
		return readList(r, field, to, math.MaxInt)
	case *[]events.Partition:
		return readList(r, field, to, math.MaxInt)
	case *[]Hashed:
		return readList(r, field, to, math.MaxInt)
	case *[]RankPlace:
		return readList(r, field, to, math.MaxInt)
	case *[]PartitionSeq:
		return readList(r, field, to, math.MaxInt)
	case *[]events.MediaItem:
		return readList(r, field, to, MaxMedia)
	case *[]EngineLoad:
		return readList(r, field, to, MaxEngineLoads)
	case *[]QuietSource:
		return readList(r, field, to, maxQuietSources)
	case *[]RouterRequest:
		return readList(r, field, to, MaxEngineLoads)
	case *[]WorkerResult:
		return readList(r, field, to, MaxEngineLoads)
	}
	return readList(r, field, to.(*[]string), math.MaxInt)
}

// intoObject reads an object, or a field of a query's text.
func (r *reader) intoObject(field string, to any) (err error) {
	n := 0
	switch to := to.(type) {
	case **RankPlace:
		*to = &RankPlace{}
		_, err = r.fields(field, (*to).members(nil))
	case *PartitionSeq:
		if n, err = r.fields(field, to.members(nil)); err == nil && n < 2 {
			err = Errorf(CodeMalformed, "%s needs a partition and a seq", r.name(field))
		}
	case *events.MediaItem:
		list := []member{{"hash", (*mediaHash)(&to.Hash)}, {"offset", &to.Offset}, {"length", &to.Length}}
		if n, err = r.fields(field, list); err == nil && n < len(list) {
			err = Errorf(CodeMalformed, "%s needs a hash, an offset and a length", r.name(field))
		}
	case *EngineLoad:
		_, err = r.fields(field, engineLoadMembers(to))
	case **routing.Target:
		*to = &routing.Target{}
		_, err = r.fields(field, []member{{"worker", &(*to).Worker}, {"rank", &(*to).Rank}})
	case **routing.Overrides:
		*to = &routing.Overrides{}
		_, err = r.fields(field, overrideMembers(*to))
	case textMember:
		if to.Text == nil {
			to.Query.Text = &Text{}
		}
		for _, m := range to.Text.members(nil) {
			if m.name == field {
				return r.into(field, m.to)
			}
		}
	case object:
		_, err = r.fields(field, to.members(nil))
	}
	return err
}

func (q *Query) members(list []member) []member {
	list = append(list, []member{
		{"model", &q.Model}, {"block_size", (*positiveNumber)(&q.BlockSize)}, {"tokens", &q.Tokens},
		{"hashes", &q.Hashes}, {"hashed", &q.Hashed}, {"engine_hashes", &q.EngineHashes}, {"lora_name", &q.LoRA},
		{"cache_salt", &q.CacheSalt}, {"media", &q.Media}, {"workers", &q.Workers}, {"ranks", &q.Ranks},
		{"endpoints", &q.Endpoints},
		{"with_endpoint", &q.WithEndpoint}, {"by_endpoint", &q.ByEndpoint}, {"within", &q.Within},
		{"with_engine_hashes", &q.WithEngineHashes}, {"partitions", &q.Partitions},
		{"min_seq", &q.MinSeq}, {"deadline_ms", (*positiveNumber)(&q.DeadlineMS)},
		{"explain", &q.Explain}, {"diagnostic", &q.Diagnostic}, {"idle", &q.Idle}, {"l3", (*string)(&q.L3)},
		{"l3_timeout_ms", (*positiveNumber)(&q.L3TimeoutMS)}, {"regions", &q.Regions},
	}...)
	return q.textMembers(list)
}

// textMembers appends the members of the query's Text.
func (q *Query) textMembers(list []member) []member {
	first := len(list)
	list = (&Text{}).members(list)
	for i := range list[first:] {
		list[first+i].to = textMember{q}
	}
	return list
}

func (t *Text) members(list []member) []member {
	return append(list, []member{
		{"prompt", (*promptText)(&t.Prompt)}, {"messages", &t.Messages}, {"tools", &t.Tools},
		{"chat_template", &t.ChatTemplate}, {"chat_template_kwargs", (*objectValue)(&t.ChatTemplateKwargs)},
		{"add_generation_prompt", &t.AddGenerationPrompt}, {"continue_final_message", &t.ContinueFinalMessage},
		{"api", &t.API}, {"request", (*objectValue)(&t.Request)}, {"return_token_ids", &t.ReturnTokenIDs},
	}...)
}

func (h *Hashed) members(list []member) []member {
	return append(list, member{"lookahead", &h.Lookahead}, member{"hashes", &h.Hashes})
}

func (p *RankPlace) members(list []member) []member {
	return append(list, member{"instance", &p.Instance}, member{"rank", &p.Rank})
}

func (p *PartitionSeq) members(list []member) []member {
	return append(list, member{"partition", &p.Partition}, member{"seq", &p.Seq})
}

func (w *WorkersRequest) members(list []member) []member {
	return append(list, member{"after", &w.After}, member{"limit", &w.Limit})
}

func (s *StatusRequest) members(list []member) []member { return append(list, member{"node", &s.Node}) }
func (v *VerifyRequest) members(list []member) []member { return append(list, member{"at", &v.At}) }

// noFields is a request without fields.
type noFields struct{}

func (*noFields) members(list []member) []member { return list }

func (s *SelectRequest) members(list []member) []member {
	q := &s.Query
	list = append(list, []member{
		{"model", &q.Model}, {"block_size", (*positiveNumber)(&q.BlockSize)}, {"tokens", &q.Tokens},
		{"hashes", &q.Hashes}, {"engine_hashes", &q.EngineHashes}, {"lora_name", &q.LoRA}, {"cache_salt", &q.CacheSalt},
		{"media", &q.Media}, {"sequence_hashes", &s.SequenceHashes}, {"isl_tokens", (*tokenCount)(&s.ISLTokens)},
		{"workers", &q.Workers}, {"endpoints", &q.Endpoints}, {"excluded_workers", &s.Excluded}, {"min_seq", &q.MinSeq},
		{"deadline_ms", (*positiveNumber)(&q.DeadlineMS)},
		{"explain", &q.Explain}, {"diagnostic", &q.Diagnostic}, {"l3", (*string)(&q.L3)},
		{"l3_timeout_ms", (*positiveNumber)(&q.L3TimeoutMS)}, {"regions", &q.Regions},
		{"request_id", &s.RequestID}, {"book", &s.Book}, {"policy", &s.Policy}, {"role", &s.Role},
		{"disaggregated", &s.Disaggregated}, {"prefill_optional", &s.PrefillOptional}, {"advisory", &s.Advisory},
		{"session_id", &s.SessionID},
		{"strict_priority", &s.StrictPriority}, {"priority_jump", &s.PriorityJump}, {"policy_class", &s.PolicyClass},
		{"pinned_worker", &s.Pinned}, {"affinity_target", &s.Affinity}, {"required_taints", &s.RequiredTaints},
		{"preferred_taints", &s.PreferredTaints}, {"expected_output_tokens", &s.ExpectedOutputTokens},
		{"router_config_override", &s.Overrides},
	}...)
	return q.textMembers(list)
}

func (p *Prompt) members(list []member) []member {
	return append(list, []member{
		{"model", &p.Model}, {"block_size", (*positiveNumber)(&p.BlockSize)}, {"tokens", &p.Tokens},
		{"hashes", &p.Hashes}, {"engine_hashes", &p.EngineHashes}, {"lora_name", &p.LoRA}, {"cache_salt", &p.CacheSalt},
		{"media", &p.Media}, {"sequence_hashes", &p.SequenceHashes}, {"isl_tokens", (*tokenCount)(&p.ISLTokens)},
	}...)
}

func (b *BookRequest) members(list []member) []member {
	return append(b.Prompt.members(list), []member{
		{"request_id", &b.RequestID}, {"worker", &b.Worker}, {"rank", &b.Rank},
		{"effective_prefill_tokens", (*tokenCount)(&b.EffectivePrefillTokens)},
		{"track_prefill_tokens", &b.TrackPrefillTokens}, {"assume_kv_reuse", &b.AssumeKVReuse},
		{"expected_output_tokens", &b.ExpectedOutputTokens}, {"session_id", &b.SessionID},
	}...)
}

func (r *RequestRef) members(list []member) []member {
	return append(list, member{"model", &r.Model}, member{"request_id", &r.RequestID})
}

// outputRef is a RequestRef of ops.OutputBlock.
type outputRef RequestRef

// Check implements the check of a request.
func (r *outputRef) Check() error { return (*RequestRef)(r).Check() }

func (r *outputRef) members(list []member) []member {
	return append((*RequestRef)(r).members(list), member{"decay_fraction", &r.DecayFraction})
}

// endRef is a RequestRef of `free`.
type endRef RequestRef

// Check implements the check of a request.
func (r *endRef) Check() error { return (*RequestRef)(r).Check() }

func (r *endRef) members(list []member) []member {
	return append((*RequestRef)(r).members(list), member{"result", (*string)(&r.Result)})
}

func (l *LoadsRequest) members(list []member) []member {
	return append(list, member{"model", &l.Model})
}

func overrideMembers(o *routing.Overrides) []member {
	return []member{
		{"overlap_score_credit", &o.OverlapScoreCredit}, {"prefill_load_scale", &o.PrefillLoadScale},
		{"overlap_score_weight", &o.OverlapScoreWeight}, {"router_temperature", &o.RouterTemperature},
		{"assume_kv_reuse", &o.AssumeKVReuse}, {"track_prefill_tokens", &o.TrackPrefillTokens},
		{"shared_cache_multiplier", &o.SharedCacheMultiplier},
	}
}

func (l *EngineLoads) members(list []member) []member {
	return append(list, member{"loads", &l.Loads}, member{"requests", &l.Requests}, member{"results", &l.Results})
}

func (r *WorkerResult) members(list []member) []member {
	return append(list, member{"worker", &r.Worker}, member{"result", (*string)(&r.Result)}, member{"age_ms", &r.AgeMS})
}

func (r *RouterRequest) members(list []member) []member {
	return append(list, []member{
		{"model", &r.Model}, {"worker", &r.Worker}, {"rank", &r.Rank}, {"request_id", &r.RequestID},
		{"change", (*string)(&r.Change)}, {"sequence_hashes", &r.SequenceHashes},
		{"prefill_tokens", (*tokenCount)(&r.PrefillTokens)},
	}...)
}

// engineLoadMembers returns the members of a report. The last four are fields of Dynamo's older ForwardPassMetrics.
// They are read and ignored, so that clients can forward such metrics unchanged.
func engineLoadMembers(l *EngineLoad) []member {
	var ignored float64
	return []member{
		{"worker", &l.Worker}, {"rank", &l.Rank}, {"kv_used_blocks", &l.UsedBlocks}, {"kv_active_blocks", &l.UsedBlocks},
		{"kv_total_blocks", &l.TotalBlocks}, {"active_decode_blocks", &l.DecodeBlocks},
		{"active_prefill_tokens", &l.PrefillTokens}, {"age_ms", &l.AgeMS},
		{"num_requests_running", &l.Running}, {"num_requests_waiting", &l.Waiting},
		{"num_waiting_tokens", &l.WaitingTokens}, {"source", &l.Source},
		{"request_active_slots", &ignored}, {"request_total_slots", &ignored}, {"gpu_cache_usage_perc", &ignored},
		{"gpu_prefix_cache_hit_rate", &ignored},
	}
}

func (s *WorkerSpec) members(list []member) []member {
	return append(list, []member{
		{"endpoint", (*nonEmptyText)(&s.Endpoint)}, {"role", &s.Role},
		{"bootstrap_port", (*positiveNumber)(&s.BootstrapPort)}, {"rank_start", &s.RankStart},
		{"rank_size", (*positiveNumber)(&s.RankSize)}, {"total_kv_blocks", (*knownCount)(&s.TotalKVBlocks)},
		{"max_num_batched_tokens", (*knownCount)(&s.MaxBatchedTokens)},
		{"stable_routing_id", (*nonEmptyText)(&s.StableRoutingID)}, {"taints", &s.Taints},
		{"topology_domains", &s.TopologyDomains}, {"lora_adapters", &s.LoRAAdapters},
		{"served_model_names", &s.ServedNames}, {"events", (*nonEmptyText)(&s.Events)},
	}...)
}

func (w *WorkerRegistration) members(list []member) []member {
	return w.WorkerSpec.members(append(list, []member{
		{"instance", &w.Instance}, {"model", &w.Model}, {"block_size", &w.BlockSize},
		{"events_endpoint", (*nonEmptyText)(&w.EventsEndpoint)}, {"replay_endpoint", (*nonEmptyText)(&w.ReplayEndpoint)},
		{"source", (*nonEmptyText)(&w.Source)},
	}...))
}

func (c *WorkerChange) members(list []member) []member {
	return c.WorkerSpec.members(append(list, member{"instance", &c.Instance}, member{"drain", &c.Drain},
		member{"why", &c.Why}, member{"reset", &c.Reset}))
}

func (w *WorkerRemoval) members(list []member) []member {
	return append(list, member{"instance", &w.Instance})
}

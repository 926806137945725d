package api

import (
	"bytes"
	"context"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// routerStub keeps the request of each operation.
type routerStub struct{ got any }

func (s *routerStub) Select(_ context.Context, r *SelectRequest) (*Selection, error) {
	s.got = r
	return &Selection{Worker: "w"}, nil
}

func (s *routerStub) Book(_ context.Context, r *BookRequest) (*Booking, error) {
	s.got = r
	return &Booking{Worker: "w"}, nil
}

func (s *routerStub) done(op string, r *RequestRef) error {
	s.got = []any{op, *r}
	return nil
}

func (s *routerStub) PrefillComplete(_ context.Context, r *RequestRef) error {
	return s.done(ops.PrefillComplete, r)
}
func (s *routerStub) Progress(_ context.Context, r *RequestRef) error { return s.done(ops.Progress, r) }
func (s *routerStub) OutputBlock(_ context.Context, r *RequestRef) error {
	return s.done(ops.OutputBlock, r)
}
func (s *routerStub) Free(_ context.Context, r *RequestRef) error { return s.done(ops.Free, r) }

func (s *routerStub) Loads(_ context.Context, r *LoadsRequest) (*LoadList, error) {
	s.got = r
	return &LoadList{}, nil
}

func (s *routerStub) PotentialLoads(_ context.Context, r *PotentialRequest) (*PotentialList, error) {
	s.got = r
	return &PotentialList{}, nil
}

func (s *routerStub) EngineLoad(_ context.Context, l *EngineLoads) error {
	s.got = l
	return nil
}

func (s *routerStub) EngineLoads(context.Context) (*EngineLoads, error) { return &EngineLoads{}, nil }

// TestRoutingRequests sends every field of every request of routing in both forms, and compares the received requests.
func TestRoutingRequests(t *testing.T) {
	rank, fraction, yes, no := events.Rank(3), 0.25, true, false
	credit, weight, heat, share := 1.5, 0.0, 0.75, 1.0
	blocks := uint64(1 << 40)
	prompt := Prompt{Model: "m", BlockSize: 16, Hashes: Hashes{1, 1 << 63}, SequenceHashes: Hashes{7, 8}, ISLTokens: 40}
	for op, sent := range map[string][]any{
		ops.Select: {
			&SelectRequest{Query: Query{Model: "m", Tokens: Tokens{1, 2, 3}, LoRA: "l", CacheSalt: "s"}},
			&SelectRequest{Query: Query{Model: "m", EngineHashes: Hashes{1, 1 << 63}, DeadlineMS: 9}, ISLTokens: 40},
			&SelectRequest{Query: Query{Model: "m", Tokens: Tokens{1}, Regions: true}},
			&SelectRequest{Query: Query{Model: "m", Tokens: Tokens{1}, Endpoints: []string{"http://a"}},
				Disaggregated: true, PrefillOptional: true, Advisory: true, SessionID: "s", StrictPriority: 3,
				PriorityJump: 1.5, PolicyClass: "batch"},
			&SelectRequest{
				Query: Query{Model: "m", BlockSize: 16, Hashes: Hashes{1, 2}, Workers: []events.WorkerID{"a", "b"},
					Explain: true, L3: L3Off, MinSeq: []PartitionSeq{{Partition: 1, Seq: 2}}},
				SequenceHashes: Hashes{7, 8}, ISLTokens: 40, RequestID: "r1", Book: true, Policy: "dynamo",
				Excluded: []events.WorkerID{"c"},
				Role:     routing.Decode, Pinned: &routing.Target{Worker: "a", Rank: &rank},
				Affinity: &routing.Target{Worker: "b"}, RequiredTaints: []string{"t"},
				PreferredTaints: map[string]float64{"u": -0.5, "v": 2}, ExpectedOutputTokens: 9,
				Overrides: &routing.Overrides{OverlapScoreCredit: &credit, PrefillLoadScale: &weight,
					OverlapScoreWeight: &weight, RouterTemperature: &heat, AssumeKVReuse: &no, TrackPrefillTokens: &yes,
					SharedCacheMultiplier: &share},
			},
		},
		ops.Book: {
			&BookRequest{Prompt: Prompt{Model: "m"}, RequestID: "r1"},
			&BookRequest{Prompt: Prompt{Model: "m", EngineHashes: Hashes{7}}, RequestID: "r1", Worker: "a"},
			&BookRequest{Prompt: prompt, RequestID: "r1", Worker: "a", Rank: 3, EffectivePrefillTokens: 30,
				TrackPrefillTokens: &no, AssumeKVReuse: &yes, ExpectedOutputTokens: 4, SessionID: "s"},
		},
		ops.PrefillComplete: {&RequestRef{Model: "m", RequestID: "r1"}},
		ops.Progress:        {&RequestRef{Model: "m", RequestID: "r1"}},
		ops.OutputBlock:     {&RequestRef{Model: "m", RequestID: "r1", DecayFraction: &fraction}},
		ops.Free: {&RequestRef{Model: "m", RequestID: "r1"},
			&RequestRef{Model: "m", RequestID: "r1", Result: ResultTimeout}},
		ops.Loads:          {&LoadsRequest{}, &LoadsRequest{Model: "m"}},
		ops.PotentialLoads: {&PotentialRequest{Prompt: prompt}},
		ops.EngineLoad: {&EngineLoads{Loads: []EngineLoad{{Worker: "a", Rank: 3, UsedBlocks: &blocks, AgeMS: 7},
			{Worker: "b", TotalBlocks: &blocks, DecodeBlocks: &blocks, PrefillTokens: &blocks}}},
			&EngineLoads{Results: []WorkerResult{{Worker: "a", Result: ResultRefused, AgeMS: 3}}}},
	} {
		for _, want := range sent {
			for _, form := range []string{JSON, MsgPack} {
				body, err := Marshal(form, want)
				if err != nil {
					t.Fatal(err)
				}
				router := &routerStub{}
				reply, failure := Handler{Router: router}.Handle(t.Context(), op, form, body)
				if failure != nil {
					t.Fatalf("%s %s: %v", op, form, failure)
				}
				if len(reply) == 0 {
					t.Errorf("%s %s: no reply", op, form)
				}
				expect := want
				if ref, is := want.(*RequestRef); is {
					expect = []any{op, *ref}
				}
				if !reflect.DeepEqual(router.got, expect) {
					t.Errorf("%s %s: sent %+v, got %+v", op, form, want, router.got)
				}
			}
		}
	}
}

// TestRoutingRequestsRefused checks the errors of invalid requests of routing.
func TestRoutingRequestsRefused(t *testing.T) {
	for _, c := range []struct{ op, body, want string }{
		{ops.Free, `{"model":"m","request_id":"r","result":"bad"}`, `result is "bad", none of [ok refused`},
		{ops.EngineLoad, `{"results":[{"worker":"w"}]}`, `results[0]: result is "", none of`},
		{ops.Select, `{"model":"m"}`, "neither tokens nor hashes"},
		{ops.Select, `{"model":"m","tokens":[1],"book":true}`, "book needs a request_id"},
		{ops.Select, `{"model":"m","tokens":[1],"isl_tokens":2}`, "isl_tokens is 2; there are 1 tokens"},
		{ops.Select, `{"model":"m","tokens":[1],"isl_tokens":-2}`, "isl_tokens is -2, not a number of tokens"},
		{ops.Select, `{"model":"m","hashes":[1],"sequence_hashes":[]}`, "1 hashes and 0 sequence_hashes"},
		{ops.Select, `{"model":"m","tokens":[1],"pinned_worker":"a"}`, `pinned_worker is "a", not an object`},
		{ops.Select, `{"model":"m","tokens":[1],"pinned_worker":{"id":"a"}}`, `there is no field "pinned_worker.id"`},
		{ops.Select, `{"model":"m","tokens":[1],"preferred_taints":{"a":"b"}}`, `preferred_taints.a is "b", not a number`},
		{ops.Select, `{"model":"m","tokens":[1],"preferred_taints":{"a":1e999}}`,
			"preferred_taints.a is 1e999, not a finite"},
		{ops.Select, `{"model":"m","tokens":[1],"router_config_override":{"temperature":1}}`, `there is no field "router_config_override.temperature"`},
		{ops.Select, `{"model":"m","tokens":[1],"role":["prefill","decode"]}`, "not one of"},
		{ops.Select, `{"model":"m","tokens":[1],"role":"decode","disaggregated":true}`, "exclude each other"},
		{ops.Select, `{"model":"m","tokens":[1],"strict_priority":-1}`, "strict_priority is -1, not"},
		{ops.Select, `{"model":"m","tokens":[1],"priority_jump":"1"}`, `priority_jump is "1", not a number`},
		{ops.Select, `{"model":"m","tokens":[1],"session_id":7}`, "session_id is 7, not text"},
		{ops.Select, `{"model":"m","tokens":[1],"session_id":"` + strings.Repeat("s", 257) + `"}`,
			"session_id has 257 bytes"},
		{ops.Book, `{"model":"m","request_id":"r","session_id":"s"}`, "all other fields must be absent"},
		{ops.Select, `{"model":"m","tokens":[1],"disaggregated":"yes"}`, `disaggregated is "yes", not true or false`},
		{ops.Select, `{"model":"m","tokens":[1],"request_id":"r","advisory":true,"book":true}`, "books nothing"},
		{ops.Select, `{"model":"m","tokens":[1],"disaggregated":true,"request_id":"` + strings.Repeat("r", 1020) + `"}`,
			"a disaggregated request's has at most 1016"},
		{ops.Select, `{"model":"m","tokens":[1],"endpoints":[]}`, "endpoints is an empty list"},
		{ops.Select, `{"model":"m","tokens":[1],"idle":true}`, `there is no field "idle"`},
		{ops.Select, `{"model":"m","hashes":[1],"engine_hashes":[1]}`, "engine_hashes, and tokens or hashes"},
		{ops.Select, `{"model":"m","engine_hashes":[1],"sequence_hashes":[]}`, "1 engine_hashes and 0 sequence_hashes"},
		{ops.Book, `{"model":"m","request_id":"r","engine_hashes":[1]}`, "has no worker"},
		{ops.Select, `{"model":"m","engine_hashes":[1],"media":[{"hash":1,"offset":0,"length":1}]}`, "valid with tokens only"},
		{ops.Book, `{"model":"m","request_id":"r","worker":"w","tokens":[1],"media":[{"hash":1,"offset":1,"length":1}]}`,
			"media[0] ends at 2; there are 1 tokens"},
		{ops.PotentialLoads, `{"model":"m","tokens":[],"engine_hashes":[]}`, "engine_hashes, and tokens or hashes"},
		{ops.Book, `{"model":"m"}`, "request_id has 0 bytes"},
		{ops.Book, `{"model":"m","request_id":"r","rank":1}`, "the booking has no worker"},
		{ops.Book, `{"model":"m","request_id":"r","worker":"a","isl_tokens":4,"effective_prefill_tokens":5}`,
			"effective_prefill_tokens is 5; the prompt has 4"},
		{ops.Free, `{"request_id":"r"}`, "has no model"},
		{ops.Free, `{"model":"m","request_id":"r","decay_fraction":1}`, `there is no field "decay_fraction"`},
		{ops.OutputBlock, `{"model":"m","request_id":"r","decay_fraction":1.5}`, "decay_fraction is 1.5, not from 0 to 1"},
		{ops.OutputBlock, `{"model":"m","request_id":"` + strings.Repeat("r", 1025) + `"}`, "request_id has 1025 bytes"},
		{ops.PotentialLoads, `{"model":"m","lora_name":"l","hashes":[]}`, "lora_name and cache_salt"},
		{ops.EngineLoad, `{"loads":{}}`, "loads is {}, not a list"},
		{ops.EngineLoad, `{"worker":"a"}`, `there is no field "worker"`},
		{ops.EngineLoad, `{"loads":[{"worker":"a"}]}`, "loads[0]: used blocks, active blocks, tokens and running requests are all missing"},
		{ops.EngineLoad, `{"loads":[{"kv_used_blocks":1}]}`, "loads[0]: worker is missing"},
		{ops.EngineLoad, `{"loads":[{"worker":"a","kv_used_blocks":-1}]}`, "loads[0].kv_used_blocks is -1"},
		{ops.EngineLoad, `{"loads":[{"worker":"a","kv_used_blocks":1,"kv_active_blocks":1}]}`, "repeats kv_used_blocks"},
		{ops.EngineLoad, `{"loads":[{"worker":"a","kv_used_blocks":1,"gpu_cache_usage_perc":"x"}]}`,
			"loads[0].gpu_cache_usage_perc is \"x\", not a number"},
		{ops.Sessions, `{"prompts":{}}`, "prompts is {}, not true or false"},
		{ops.Sessions, `{"session_id":"` + strings.Repeat("s", 257) + `"}`, "session_id has 257 bytes"},
		{ops.EndSession, `{"session_id":"` + strings.Repeat("s", 257) + `"}`, "session_id has 257 bytes"},
		{ops.EndSession, `{}`, "the request has no session_id"},
		{ops.HotPrefixes, `{"model":"m","limit":65}`, "limit is 65, more than 64"},
		{ops.HotPrefixes, `{}`, "the request has no model"},
		{ops.Warm, `{"model":"m","tokens":[1]}`, "the request has no worker"},
		{ops.Warm, `{"worker":"w","tokens":[1]}`, "the request has no model"},
		{ops.Warm, `{"model":"m","worker":"w"}`, "the request needs either tokens or hash"},
		{ops.Warm, `{"model":"m","worker":"w","tokens":[1],"hash":"00000000000000ab"}`, "needs either tokens or hash"},
		{ops.Warm, `{"model":"m","worker":"w","hash":"ab"}`, "a hash has 16 hexadecimal digits"},
		{ops.Warm, `{"model":"m","worker":"w","hash":"00000000000000ab","cache_salt":"s"}`, "are only for tokens"},
	} {
		h := Handler{Router: &routerStub{}, Insights: struct{ Insights }{}, Hots: struct{ Hots }{}}
		_, failure := h.Handle(t.Context(), c.op, JSON, []byte(c.body))
		if failure == nil || !strings.Contains(failure.Message, c.want) {
			t.Errorf("%s %.80s: %v, want %q", c.op, c.body, failure, c.want)
		}
	}
	if _, failure := (Handler{}).Handle(t.Context(), ops.Select, JSON, nil); failure.Code != CodeUnknownOperation {
		t.Error(failure)
	}
}

// FuzzEngineLoads: accepted reports pass the check, and encode and decode without change in both forms.
func FuzzEngineLoads(f *testing.F) {
	f.Add(true, []byte(`{"loads":[{"worker":"a","rank":1,"kv_active_blocks":1,"request_active_slots":3}]}`))
	used := uint64(9)
	packed, _ := Marshal(MsgPack, &EngineLoads{Loads: []EngineLoad{{Worker: "a", UsedBlocks: &used, AgeMS: 5}}})
	f.Add(false, packed)
	f.Fuzz(func(t *testing.T, asJSON bool, body []byte) {
		form := MsgPack
		if asJSON {
			form = JSON
		}
		l, err := ReadEngineLoads(form, body)
		if err != nil {
			return
		}
		for _, form := range []string{JSON, MsgPack} {
			again, err := Marshal(form, l)
			if err != nil {
				t.Fatal(err)
			}
			if read, err := ReadEngineLoads(form, again); err != nil || !reflect.DeepEqual(read, l) &&
				len(l.Loads) > 0 {
				t.Fatalf("%s: %+v, %v, want %+v", again, read, err, l)
			}
		}
	})
}

// TestPackedSelectAsByReflection compares packed requests, usual and unusual, with reflection.
func TestPackedSelectAsByReflection(t *testing.T) {
	usual := 0
	for seed := range uint64(500) {
		rng := rand.New(rand.NewPCG(seed, 12))
		maybe := func() bool { return rng.IntN(2) == 0 }
		s := &SelectRequest{Query: Query{Model: "m"}, Book: maybe()}
		if maybe() {
			s.Hashes, s.SequenceHashes = Hashes{rng.Uint64(), rng.Uint64()}, Hashes{}
		} else {
			s.Tokens, s.LoRA, s.CacheSalt = Tokens{rng.Uint32()}, "l", "s"
		}
		if maybe() {
			s.ISLTokens, s.RequestID, s.BlockSize, s.L3 = rng.Uint64N(1<<20), "r", 16, L3Off
		}
		switch rng.IntN(8) {
		case 0:
			s.Role = routing.Decode
		case 1:
			s.Workers = []events.WorkerID{"w"}
		case 2:
			s.Overrides = &routing.Overrides{}
		}
		if s.usual() {
			usual++
		}
		got, err := Marshal(MsgPack, s)
		if err != nil {
			t.Fatal(err)
		}
		if want, err := marshalReflect(s); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("seed %d: %+v: %x, want %x, %v", seed, s, got, want, err)
		}
	}
	if usual == 0 || usual == 500 {
		t.Errorf("%d are usual", usual)
	}
}

// TestPackedSelectionAsByReflection compares packed choices, usual and unusual, with reflection.
func TestPackedSelectionAsByReflection(t *testing.T) {
	usual := 0
	for seed := range uint64(500) {
		s := &Selection{}
		rng := rand.New(rand.NewPCG(seed, 13))
		fields := reflect.ValueOf(s).Elem()
		for i := range fields.NumField() {
			switch f := fields.Field(i); f.Kind() {
			case reflect.String:
				f.SetString(strings.Repeat("x", rng.IntN(3)*rng.IntN(300)))
			case reflect.Bool:
				f.SetBool(rng.IntN(2) == 0)
			case reflect.Int:
				f.SetInt(rng.Int64N(1 << rng.IntN(40)))
			case reflect.Uint32:
				f.SetUint(uint64(rng.Uint32() >> rng.IntN(32)))
			case reflect.Uint64:
				f.SetUint(rng.Uint64() >> rng.IntN(64))
			case reflect.Float64:
				f.SetFloat(rng.NormFloat64() * float64(rng.IntN(2)))
			case reflect.Pointer:
				if rng.IntN(30) == 0 {
					f.Set(reflect.New(f.Type().Elem()))
				}
			case reflect.Slice:
				if rng.IntN(10) == 0 {
					f.Set(reflect.MakeSlice(f.Type(), rng.IntN(3), 3))
				}
			default:
				t.Fatalf("a field is %v", f.Type())
			}
		}
		if s.usual() {
			usual++
		}
		got, err := Marshal(MsgPack, s)
		if err != nil {
			t.Fatal(err)
		}
		if want, err := marshalReflect(s); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("seed %d: %+v: %x, want %x, %v", seed, s, got, want, err)
		}
		sameJSON(t, s)
	}
	if usual < 100 || usual > 450 {
		t.Errorf("%d are usual", usual)
	}
}

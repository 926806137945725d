package api

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestWorkersAreRefusedByName: each invalid registration has a code and an error with the field, in JSON and
// MessagePack.
func TestWorkersAreRefusedByName(t *testing.T) {
	const good = `{"instance":"w","model":"m","block_size":16`
	long := strings.Repeat("x", 256)
	many := `["` + strings.Join(strings.Split(strings.Repeat("t", 65), ""), `","`) + `"]`
	for _, c := range []struct {
		op, body string
		code     Code
		want     string
	}{
		{ops.RegisterWorker, good + `}`, "", ""},
		{ops.RegisterWorker, good + `,"events":"none","role":"decode","rank_start":3,"rank_size":4096,"total_kv_blocks":1}`,
			"", ""},
		{ops.RegisterWorker, good + `,"taints":[],"topology_domains":{},"lora_adapters":null}`, "", ""},
		{ops.RegisterWorker, `{"model":"m","block_size":16}`, CodeMalformed, "has no instance"},
		{ops.RegisterWorker, `{"instance":"w","block_size":16}`, CodeMissingModel, "has no model"},
		{ops.RegisterWorker, `{"instance":"w","model":"m"}`, CodeMalformed, "block_size is 0"},
		{ops.RegisterWorker, `{"instance":"w","model":"m","block_size":100000000}`, CodeMalformed, "block_size is 1"},
		{ops.RegisterWorker, good + `,"rol":"decode"}`, CodeMalformed, `did you mean "role"?`},
		{ops.RegisterWorker, good + `,"events":"none","role":"encode","bootstrap_port":65535}`, "", ""},
		{ops.RegisterWorker, good + `,"bootstrap_port":0}`, CodeMalformed, "bootstrap_port is 0"},
		{ops.RegisterWorker, good + `,"bootstrap_port":65536}`, CodeMalformed, "bootstrap_port is 65536"},
		{ops.RegisterWorker, good + `,"bootstrap_port":"8998"}`, CodeMalformed, "bootstrap_port is"},
		{ops.RegisterWorker, good + `,"role":"both"}`, CodeMalformed, "a worker has one role"},
		{ops.RegisterWorker, good + `,"role":"prefill,decode"}`, CodeMalformed, "a worker has one role"},
		{ops.RegisterWorker, good + `,"role":["prefill","decode"]}`, CodeMalformed, "role is a list; a worker has one role"},
		{ops.RegisterWorker, good + `,"role":"prefill","role":"decode"}`, CodeMalformed, "role is given twice"},
		{ops.RegisterWorker, good + `,"total_kv_blocks":-1}`, CodeMalformed, "total_kv_blocks is -1, not a whole number"},
		{ops.RegisterWorker, good + `,"total_kv_blocks":1.5}`, CodeMalformed, "total_kv_blocks is "},
		{ops.RegisterWorker, good + `,"max_num_batched_tokens":0}`, CodeMalformed, "max_num_batched_tokens is 0"},
		{ops.RegisterWorker, good + `,"total_kv_blocks":9007199254740993}`, CodeMalformed, "to 2^53"},
		{ops.RegisterWorker, good + `,"rank_size":0}`, CodeMalformed, "rank_size is 0"},
		{ops.RegisterWorker, good + `,"rank_size":4097}`, CodeMalformed, "4096 ranks at most"},
		{ops.RegisterWorker, good + `,"rank_start":1}`, CodeMalformed, "rank_start goes with rank_size"},
		{ops.RegisterWorker, good + `,"rank_start":4294967295,"rank_size":2}`, CodeMalformed, "beyond 32 bits"},
		{ops.RegisterWorker, good + `,"rank_start":4294967295,"rank_size":1}`, "", ""},
		{ops.RegisterWorker, good + `,"endpoint":""}`, CodeMalformed, "endpoint is empty"},
		{ops.RegisterWorker, good + `,"stable_routing_id":"` + long + `"}`, CodeMalformed, "256 bytes"},
		{ops.RegisterWorker, good + `,"taints":"a"}`, CodeMalformed, "taints is"},
		{ops.RegisterWorker, good + `,"taints":["a",7]}`, CodeMalformed, "taints[1] is 7, not text"},
		{ops.RegisterWorker, good + `,"taints":["a",""]}`, CodeMalformed, "taints"},
		{ops.RegisterWorker, good + `,"taints":` + many + `}`, CodeMalformed, "65 elements, more than 64"},
		{ops.RegisterWorker, good + `,"topology_domains":{"zone":7}}`, CodeMalformed, "topology_domains.zone is 7, not text"},
		{ops.RegisterWorker, good + `,"topology_domains":{"zone":"a","zone":"b"}}`, CodeMalformed, "zone is given twice"},
		{ops.RegisterWorker, good + `,"topology_domains":{"zone":""}}`, CodeMalformed, "zone"},
		{ops.RegisterWorker, good + `,"topology_domains":[]}`, CodeMalformed, "not an object"},
		{ops.RegisterWorker, good + `,"events":"shim"}`, CodeMalformed, `set it to "none"`},
		{ops.RegisterWorker, good + `,"events":"none","events_endpoint":"tcp://h:1"}`, CodeMalformed, "give one of them"},
		{ops.RegisterWorker, good + `,"replay_endpoint":"tcp://h:1"}`, CodeMalformed, "valid with events_endpoint only"},
		{ops.RegisterWorker, `{"instance":"` + long + `","model":"m","block_size":16}`, CodeMalformed, "instance has 256"},
		{ops.ChangeWorker, `{"instance":"w"}`, "", ""},
		{ops.ChangeWorker, `{"instance":"w","role":null,"taints":null,"drain":null}`, "", ""},
		{ops.ChangeWorker, `{}`, CodeMalformed, "has no instance"},
		{ops.ChangeWorker, ``, CodeMalformed, "empty"},
		{ops.ChangeWorker, `{"instance":"w","drain":1}`, CodeMalformed, "drain is 1, not true or false"},
		{ops.ChangeWorker, `{"instance":"w","why":"x"}`, CodeMalformed, "why goes with drain: true"},
		{ops.ChangeWorker, `{"instance":"w","why":"x","drain":false}`, CodeMalformed, "why goes with drain: true"},
		{ops.ChangeWorker, `{"instance":"w","model":"n"}`, CodeMalformed, `there is no field "model"`},
		{ops.RemoveWorker, `{"instance":"w"}`, "", ""},
		{ops.RemoveWorker, ``, CodeMalformed, "has no instance"},
		{ops.RemoveWorker, `{"instance":"w","force":true}`, CodeMalformed, `there is no field "force"`},
	} {
		bodies := map[string][]byte{JSON: []byte(c.body)}
		if c.body != "" {
			bodies[MsgPack] = packed(t, c.body)
		}
		for contentType, body := range bodies {
			_, failure := Handler{Indexer: &echo{}, Registrar: &echo{}}.Handle(context.Background(), c.op, contentType, body)
			switch {
			case c.code == "" && failure != nil:
				t.Errorf("%s %s %s: %v", c.op, contentType, c.body, failure)
			case c.code != "" && (failure == nil || failure.Code != c.code || !strings.Contains(failure.Message, c.want)):
				t.Errorf("%s %s %s: %v, want %s with %q", c.op, contentType, c.body, failure, c.code, c.want)
			}
		}
	}
	nan := append([]byte("\x81\xaftotal_kv_blocks"), msgp.AppendFloat(nil, math.NaN())...)
	_, failure := Handler{Registrar: &echo{}, Instance: "w"}.Handle(context.Background(), ops.ChangeWorker, MsgPack, nan)
	if failure == nil || !strings.Contains(failure.Message, "total_kv_blocks is a floating-point number, not a whole") {
		t.Errorf("NaN: %v", failure)
	}
}

// TestThePathNamesTheWorker: the request is about the worker of the path.
func TestThePathNamesTheWorker(t *testing.T) {
	for _, c := range []struct{ op, body, want string }{
		{ops.ChangeWorker, `{}`, ""}, {ops.ChangeWorker, `{"instance":"w"}`, ""},
		{ops.ChangeWorker, `{"instance":"v"}`, `the path names worker "w", and the body "v"`},
		{ops.RemoveWorker, ``, ""}, {ops.RemoveWorker, `{"instance":"v"}`, `the body "v"`},
	} {
		e := &echo{}
		h := Handler{Indexer: e, Registrar: e, Instance: "w"}
		_, failure := h.Handle(context.Background(), c.op, JSON, []byte(c.body))
		if c.want != "" {
			if failure == nil || !strings.Contains(failure.Message, c.want) {
				t.Errorf("%s %s: %v", c.op, c.body, failure)
			}
			continue
		}
		if failure != nil || e.removed != "w" && (e.change == nil || e.change.Instance != "w") {
			t.Errorf("%s %s: %v, %+v", c.op, c.body, failure, e)
		}
	}
}

// randomSpec returns a spec with random fields set.
func randomSpec(rng *rand.Rand) (s WorkerSpec) {
	said := func() bool { return rng.IntN(2) == 0 }
	texts := func() []string {
		return [][]string{nil, {}, {"a"}, {"a", "b"}}[rng.IntN(4)]
	}
	if said() {
		s.Endpoint, s.Role = "http://h:1", roles[rng.IntN(len(roles))]
	}
	if said() {
		s.RankStart, s.RankSize = rng.Uint32N(3), 1+rng.Uint32N(3)
	}
	if said() {
		s.TotalKVBlocks, s.StableRoutingID = 1+rng.Uint64N(9), "id"
	}
	if said() {
		s.MaxBatchedTokens, s.Events = 1+rng.Uint64N(9), EventsNone
	}
	s.Taints, s.LoRAAdapters = texts(), texts()
	s.TopologyDomains = []map[string]string{nil, {}, {"zone": "a"}, {"zone": "b", "rack": "7"}}[rng.IntN(4)]
	return s
}

// TestSpecsAtRandom: specs survive each form, empty fields change nothing, the last value counts, and the range of
// ranks equals a count. The twin merges the JSON of two specs.
func TestSpecsAtRandom(t *testing.T) {
	rng := rand.New(rand.NewPCG(15, 1))
	for range testkit.Rounds(2000) {
		a, b := randomSpec(rng), randomSpec(rng)
		for _, contentType := range []string{JSON, MsgPack} {
			sent := &WorkerChange{Instance: "w", WorkerSpec: a}
			body, err := Marshal(contentType, sent)
			if err != nil {
				t.Fatal(err)
			}
			e := &echo{}
			if _, failure := (Handler{Registrar: e}).Handle(context.Background(), ops.ChangeWorker, contentType,
				body); failure != nil || !reflect.DeepEqual(e.change, sent) {
				t.Fatalf("%s: %+v became %+v, %v", contentType, sent, e.change, failure)
			}
			list := &WorkerList{Workers: []WorkerInfo{{Record: &WorkerRecord{WorkerSpec: a, State: WorkerDraining,
				Reasons: []string{"so"}}}}}
			var again WorkerList
			if body, err = Marshal(contentType, list); err == nil {
				err = Unmarshal(contentType, body, &again)
			}
			if err != nil || !reflect.DeepEqual(again.Workers[0].Record, list.Workers[0].Record) {
				t.Fatalf("%s: a list's %+v became %+v, %v", contentType, list.Workers[0].Record,
					again.Workers[0].Record, err)
			}
		}
		members := func(s WorkerSpec) (m map[string]any) {
			text, err := json.Marshal(s)
			if err == nil {
				err = json.Unmarshal(text, &m)
			}
			if err != nil {
				t.Fatal(err)
			}
			return m
		}
		want := members(a)
		over := members(b)
		if over["rank_size"] != nil {
			delete(want, "rank_start")
		}
		for name, v := range over {
			want[name] = v
		}
		if got := members(a.With(b)); !reflect.DeepEqual(got, want) {
			t.Fatalf("%+v with %+v is %v, want %v", a, b, got, want)
		}
		for rank := range uint32(8) {
			in := a.RankSize == 0
			for i := range a.RankSize {
				in = in || a.RankStart+i == rank
			}
			if a.Covers(events.Rank(rank)) != in {
				t.Fatalf("%+v covers rank %d: %v", a, rank, !in)
			}
		}
	}
}

// TestReadWorkerSpec: the error has the name of the field.
func TestReadWorkerSpec(t *testing.T) {
	if s, err := ReadWorkerSpec("record", []byte(`{"taints":["b","a","b"],"role":"decode"}`)); err != nil ||
		!reflect.DeepEqual(*s, WorkerSpec{Role: RoleDecode, Taints: []string{"a", "b"}}) {
		t.Errorf("%+v, %v", s, err)
	}
	for text, want := range map[string]string{
		`[]`: "record is", `{"total_kv_blocks":-1}`: "record.total_kv_blocks is -1", `{"role":"x"}`: "role is",
		`{"taints":[1]}`: "record.taints[0] is 1", `{"instance":"w"}`: `"record.instance"`,
	} {
		var e *Error
		if _, err := ReadWorkerSpec("record", []byte(text)); !errors.As(err, &e) || !strings.Contains(e.Message, want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// FuzzWorkers: a registration, a change and a removal are accepted or refused, and accepted ones can be sent again.
func FuzzWorkers(f *testing.F) {
	f.Add(0, true, []byte(`{"instance":"w","model":"m","block_size":16,"topology_domains":{"zone":"a"}}`))
	f.Add(1, true, []byte(`{"instance":"w","drain":true,"why":"so","taints":["a"]}`))
	f.Add(2, false, []byte("\x81\xa8instance\xa1w"))
	f.Fuzz(func(t *testing.T, which int, asJSON bool, body []byte) {
		op := []string{ops.RegisterWorker, ops.ChangeWorker, ops.RemoveWorker}[uint(which)%3]
		contentType := MsgPack
		if asJSON {
			contentType = JSON
		}
		e := &echo{}
		h := Handler{Indexer: e, Registrar: e}
		if _, failure := h.Handle(context.Background(), op, contentType, body); failure != nil {
			return
		}
		var sent any = &WorkerRemoval{Instance: e.removed}
		switch op {
		case ops.RegisterWorker:
			sent = e.registered
		case ops.ChangeWorker:
			sent = e.change
		}
		again, err := Marshal(contentType, sent)
		if err != nil {
			t.Fatal(err)
		}
		twice := &echo{}
		if _, failure := (Handler{Indexer: twice, Registrar: twice}).Handle(context.Background(), op, contentType,
			again); failure != nil || !reflect.DeepEqual(e, twice) {
			t.Fatalf("%+v became %+v, %v", e, twice, failure)
		}
	})
}

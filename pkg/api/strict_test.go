package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/vmihailenco/msgpack/v5"
)

// packed converts JSON to MessagePack, with repeated names. A text quoted with % becomes bytes that need not be UTF-8.
func packed(t *testing.T, text string) []byte {
	t.Helper()
	dec := json.NewDecoder(strings.NewReader(text))
	dec.UseNumber()
	var value func() []byte
	value = func() []byte {
		token, err := dec.Token()
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		var p []byte
		switch v := token.(type) {
		case json.Delim:
			n := 0
			var inside []byte
			for ; dec.More(); n++ {
				inside = append(inside, value()...)
			}
			dec.Token()
			if v == '{' {
				p = msgp.AppendMapHead(p, n/2)
			} else {
				p = msgp.AppendArrayHead(p, n)
			}
			return append(p, inside...)
		case json.Number:
			if whole, err := strconv.ParseInt(string(v), 10, 64); err == nil && whole < 0 {
				b, _ := msgpack.Marshal(whole)
				return b
			}
			if whole, err := strconv.ParseUint(string(v), 10, 64); err == nil {
				return msgp.AppendUint(p, whole)
			}
			f, _ := v.Float64()
			return msgp.AppendFloat(p, f)
		case string:
			if v == "INVALID" {
				v = "\xff"
			}
			return msgp.AppendStr(p, v)
		case bool:
			return msgp.AppendBool(p, v)
		case nil:
			return msgp.AppendNil(p)
		}
		return p
	}
	return value()
}

// TestRefusedByName: every field has its effect or is refused by name, in both forms alike.
func TestRefusedByName(t *testing.T) {
	for _, c := range []struct {
		op, body string
		want     string // in the message; empty: accepted
	}{
		{ops.Find, `{"model":"m","tokens":[1],"lora":"a"}`, `there is no field "lora"; did you mean "lora_name"?`},
		{ops.Find, `{"model":"m","tokens":[1],"Cache_Salt":"a"}`,
			`there is no field "Cache_Salt"; did you mean "cache_salt"?`},
		{ops.Find, `{"Model":"m","tokens":[1]}`, `there is no field "Model"; did you mean "model"?`},
		{ops.Find, `{"model":"m","token_ids":[1]}`, `there is no field "token_ids"; did you mean "tokens"?`},
		{ops.Find, `{"model":"m","tokens":[1],"cachesalt":"a"}`, `did you mean "cache_salt"?`},
		{ops.Find, `{"model":"m","tokens":[1],"blok_size":4}`, `did you mean "block_size"?`},
		{ops.Find, `{"model":"m","tokens":[1],"block_mm_infos":[null]}`,
			`there is no field "block_mm_infos"; media has the tokens of each item`},
		{ops.Find, `{"model":"m","tokens":[1],"zone":{"a":[1,{"b":null}]}}`,
			`there is no field "zone"; there are model, block_size, `},
		{ops.Find, `{"model":"m","tokens":[1],"min_seq":[{"partition":1,"sequence":2}]}`,
			`there is no field "min_seq[0].sequence"`},
		{ops.Find, `{"model":"m","tokens":[1],"model":"n"}`, `model is given twice`},
		{ops.Find, `{"model":"m","tokens":[1],"min_seq":[{"seq":1,"seq":1,"partition":0}]}`,
			`min_seq[0].seq is given twice`},
		{ops.Find, `{"model":"m","tokens":[1],"block_size":0}`, `block_size is 0; omit it`},
		{ops.Find, `{"model":"m","tokens":[1],"block_size":-16}`, `block_size is -16, not an unsigned 32-bit number`},
		{ops.Find, `{"model":"m","tokens":[1],"block_size":1.5}`, `block_size is`},
		{ops.Find, `{"model":"m","tokens":[1],"block_size":"16"}`, `block_size is "16", not an unsigned 32-bit number`},
		{ops.Find, `{"model":"m","tokens":[1],"block_size":4294967296}`, `block_size is 4294967296, not`},
		{ops.Find, `{"model":"m","tokens":[1],"l3_timeout_ms":0}`, `l3_timeout_ms is 0; omit it`},
		{ops.Find, `{"model":7,"tokens":[1]}`, `model is 7, not text`},
		{ops.Find, `{"model":"m","tokens":[1],"explain":1}`, `explain is 1, not true or false`},
		{ops.Find, `{"model":"m","tokens":[1],"workers":[]}`, `workers is an empty list`},
		{ops.Find, `{"model":"m","tokens":[1],"ranks":[]}`, `ranks is an empty list`},
		{ops.Find, `{"model":"m","tokens":[1],"ranks":["w"]}`, `ranks[0] is "w", not an object`},
		{ops.Find, `{"model":"m","tokens":[1],"ranks":[{"rank":1}]}`, `ranks[0] has no instance`},
		{ops.Find, `{"model":"m","tokens":[1],"ranks":[{"instance":"w","rank":-1}]}`, `ranks[0].rank is -1`},
		{ops.Find, `{"model":"m","tokens":[1],"workers":["w"],"ranks":[{"instance":"w"}]}`, `workers and ranks`},
		{ops.Find, `{"model":"m","tokens":[1],"endpoints":[]}`, `endpoints is an empty list`},
		{ops.Find, `{"model":"m","tokens":[1],"endpoints":["a",""]}`, `endpoints has an empty element`},
		{ops.Find, `{"model":"m","tokens":[1],"endpoints":[1]}`, `endpoints[0] is 1, not text`},
		{ops.Find, `{"model":"m","tokens":[1],"endpoints":["a"],"workers":["w"]}`, `endpoints, and workers or ranks`},
		{ops.Find, `{"model":"m","tokens":[1],"endpoints":["a"],"ranks":[{"instance":"w"}]}`, `endpoints, and workers or`},
		{ops.Find, `{"model":"m","tokens":[1],"by_endpoint":"url"}`, `by_endpoint is "url", not true or false`},
		{ops.Find, `{"model":"m","tokens":[1],"within":[]}`, `within has 0 sets of tiers; it may have 1 to 15`},
		{ops.Find, `{"model":"m","tokens":[1],"within":"host"}`, `within is "host", not a list`},
		{ops.Find, `{"model":"m","tokens":[1],"within":["host",""]}`, `"" is not a set of tiers`},
		{ops.Find, `{"model":"m","tokens":[1],"within":["device+gpu"]}`, `"device+gpu" is not a set of tiers, which are`},
		{ops.Find, `{"model":"m","tokens":[1],"within":["host+host"]}`, `"host+host" is not a set of tiers`},
		{ops.Find, `{"model":"m","tokens":[1],"within":["host","disk+device+external","host"]}`, ``},
		{ops.Find, `{"model":"m","tokens":[1],"media":[{"hash":1}]}`, `media[0] needs a hash, an offset and a length`},
		{ops.Find, `{"model":"m","tokens":[1],"media":["h"]}`, `media[0] is "h", not an object`},
		{ops.Find, `{"model":"m","tokens":[1],"media":[{"hash":"","offset":0,"length":1}]}`, `media[0].hash is empty`},
		{ops.Find, `{"model":"m","tokens":[1],"media":[{"hash":-1,"offset":0,"length":1}]}`,
			`media[0].hash is -1, not the identifier that the engine gives the item`},
		{ops.Find, `{"model":"m","tokens":[1],"media":[{"hash":1,"offset":0,"length":0}]}`, `media[0].length is 0`},
		{ops.Find, `{"model":"m","tokens":[1,2],"media":[{"hash":1,"offset":1,"length":2}]}`, `media[0] ends at 3; there are 2`},
		{ops.Find, `{"model":"m","tokens":[1,2],"media":[{"hash":1,"offset":1,"length":1},{"hash":"a","offset":0,"length":1}]}`,
			`media[1].offset is 0, and media[0] ends at 2`},
		{ops.Find, `{"model":"m","tokens":[1,2],"media":[{"hash":"a","offset":0,"length":1},{"hash":2,"offset":1,"length":1}]}`, ``},
		{ops.Find, `{"model":"m","tokens":[1],"media":[]}`, ``},
		{ops.Find, `{"model":"m","hashes":[1],"media":[{"hash":1,"offset":0,"length":1}]}`, `it is valid with tokens only`},
		{ops.Find, `{"model":"m","prompt":"a","media":[{"hash":1,"offset":0,"length":1}]}`, `it is valid with tokens only`},
		{ops.Find, `{"model":"m","tokens":[1],"workers":"w1"}`, `workers is "w1", not a list`},
		{ops.Find, `{"model":"m","tokens":[1],"workers":["w1",2]}`, `workers[1] is 2, not text`},
		{ops.Find, `{"model":"m","tokens":[1],"workers":[null]}`, `workers[0] is null, not text`},
		{ops.Find, `{"model":"m","tokens":[1],"partitions":[]}`, `partitions is an empty list`},
		{ops.Prefixes, `{"model":"m","node":"n","partitions":[]}`, `partitions is an empty list`},
		{ops.Prefixes, `{"model":"m","partitions":[1]}`, `partitions is valid with node only`},
		{ops.Find, `{"model":"m","hashed":[]}`, `hashed is an empty list`},
		{ops.Find, `{"model":"m","hashed":[{"lookahead":1,"hash":[1]}]}`,
			`there is no field "hashed[0].hash"; did you mean "hashes"?`},
		{ops.Find, `{"model":"m","hashed":[{"lookahead":1,"hashes":[true]}]}`,
			`hashed[0].hashes[0] is true, not a 64-bit whole number`},
		{ops.Find, `{"model":"m","tokens":[1],"min_seq":[{"partition":1}]}`, `min_seq[0] needs a partition and a seq`},
		{ops.Find, `{"model":"m","tokens":[1],"min_seq":[null]}`, `min_seq[0] is null, not an object`},
		{ops.Find, `{"model":"m","tokens":[1],"min_seq":[{"partition":1,"seq":"2x"}]}`,
			`min_seq[0].seq is "2x", not an unsigned 64-bit number`},
		{ops.Find, `{"model":"m","tokens":[1],"cache_salt":"INVALID"}`, `cache_salt is not UTF-8`},
		{ops.Find, `{"model":"INVALID","tokens":[1]}`, `model is not UTF-8`},
		{ops.Find, `{"model":"m","tokens":[1],"workers":["INVALID"]}`, `workers[0] is not UTF-8`},
		{ops.Find, `{"model":"m","tokens":[1],"INVALID":1}`, `is not UTF-8`},
		{ops.Find, `["model"]`, `the query is`},
		{ops.Find, `null`, `the query is null, not an object`},
		{ops.Find, `{"model":"m","hashes":{"a":1}}`, `not an array`},
		{ops.Find, `{"model":"m","hashes":["12x"]}`, `hashes[0] is "12x", not a 64-bit whole number`},
		{ops.Find, `{"model":"m","hashes":[null]}`, `hashes[0] is null`},
		{ops.Find, `{"model":"m","tokens":["12"]}`, `tokens[0] is "12", not an unsigned 32-bit number`},
		{ops.Workers, `{"Limit":3}`, `there is no field "Limit"; did you mean "limit"?`},
		{ops.Workers, `{"limit":-3}`, `limit is -3, not a number of workers`},
		{ops.Workers, `{"after":{"instance":"a","rank":"b"}}`, `after.rank is "b"`},
		{ops.Verify, `{"at":[{"partition":1,"seq":-2}]}`, `at[0].seq is -2`},
		{ops.Status, `{"nodes":"a"}`, `there is no field "nodes"; did you mean "node"?`},
		{ops.Status, `{"node":"a"}`, ``},
		{ops.Status, `{"node":1}`, `node`},
		{ops.Snapshot, `{"node":"a"}`, `there is no field "node": the object has no fields`},
		{ops.Snapshot, `{"partition":3}`, `there is no field "partition"`},

		{ops.Find,
			`{"model":"m","tokens":[],"lora_name":null,"cache_salt":"","workers":null,"min_seq":[],"idle":false,"block_size":null}`, ``},
		{ops.Find,
			`{"model":"m","hashes":["18446744073709551615",-1,"-1","0"],"min_seq":[{"partition":0,"seq":"18446744073709551615"}]}`, ``},
		{ops.Find, `{"model":"m","tokens":[1],"endpoints":["a","a"],"with_endpoint":true,"by_endpoint":true}`, ``},
		{ops.Find, `{"model":"m","tokens":[1],"regions":true}`, ``},
		{ops.Find, `{"model":"m","tokens":[1],"regions":["eu"]}`, `regions is`},
		{ops.Find, `{"model":"m","engine_hashes":["18446744073709551615",-1,9007199254740993,"-9223372036854775808"]}`, ``},
		{ops.Find, `{"model":"m","engine_hashes":[]}`, ``},
		{ops.Find, `{"model":"m","tokens":[],"deadline_ms":4294967295}`, ``},
		{ops.Find, `{"model":"m","tokens":[],"deadline_ms":0}`, `deadline_ms is 0; omit it`},
		{ops.Find, `{"model":"m","tokens":[],"deadline_ms":1.5}`, `deadline_ms is`},
		{ops.Find, `{"model":"m","engine_hashes":[1.5]}`, `engine_hashes[0] is`},
		{ops.Find, `{"model":"m","engine_hashes":["0x1"]}`, `engine_hashes[0] is "0x1", not a 64-bit whole number`},
		{ops.Find, `{"model":"m","engine_hashes":[1],"hashes":[1]}`, `engine_hashes, and tokens or hashes`},
		{ops.Find, `{"model":"m","engine_hashes":[1],"tokens":[1]}`, `engine_hashes, and tokens or hashes`},
		{ops.Find, `{"model":"m","engine_hashes":[1],"cache_salt":"s"}`, `valid with tokens only`},
		{ops.Find, `{"model":"m","engine_hashes":[1],"explain":true}`, `explain is valid with tokens or hashes`},
		{ops.Workers, `{"after":{"instance":"a","rank":1},"limit":0}`, ``},
		{ops.Workers, `null`, ``},
		{ops.Verify, `{"at":[{"partition":1,"seq":"2"}]}`, ``},
		{ops.Snapshot, `{}`, ``},
		{ops.Status, `null`, `disk on fire`},
	} {
		asJSON := bytes.ReplaceAll([]byte(c.body), []byte("INVALID"), []byte("\xff"))
		for contentType, body := range map[string][]byte{JSON: asJSON, MsgPack: packed(t, c.body)} {
			_, failure := Handler{Indexer: &anything{}}.Handle(context.Background(), c.op, contentType, body)
			switch {
			case c.want == "" && failure != nil, c.want != "" &&
				(failure == nil || !strings.Contains(failure.Message, c.want)):
				t.Errorf("%s %s %s: %v, want %q", c.op, contentType, c.body, failure, c.want)
			case failure == nil || failure.Code == CodeInternal:
			case failure.Code != CodeMalformed && failure.Code != CodeBadTokens ||
				strings.Contains(failure.Message, "Go ") || !utf8.ValidString(failure.Message):
				t.Errorf("%s %s %s: %v", c.op, contentType, c.body, failure)
			}
		}
	}
}

// anything is an indexer with an answer for every request.
type anything struct{ echo }

func (*anything) Snapshot(context.Context) (*SnapshotList, error) { return &SnapshotList{}, nil }

// TestBrokenBodies: the error of a broken body has the position of the fault.
func TestBrokenBodies(t *testing.T) {
	query, _ := Marshal(MsgPack, &Query{Model: "m", Hashes: Hashes{1}})
	for _, c := range []struct{ contentType, body, want string }{
		{MsgPack, string(query) + "\x00", "something follows the MessagePack value"},
		{MsgPack, string(query[:len(query)-1]), "ends too early"},
		{MsgPack, "\x81\x01\x02", "a name is a number, not text"},
		{MsgPack, "\x82\xa5model\xa1m\xa6hashes\x91\xcb\x40\x00\x00\x00\x00\x00\x00\x00",
			"hashes[0] is a floating-point number"},
		{MsgPack, "", "the body is empty"},
		{JSON, " \n", "the body is empty"},
		{JSON, `{"model":"m","tokens":[1,]}`, `byte 25 is ']', where a value should be`},
		{JSON, `{"model":"m","tokens":[01]}`, `byte 24 is '1'`},
		{JSON, `{"model":"m","tokens":[1 2]}`, `byte 25 is '2', where "," or "]" should be`},
		{JSON, `{"model":"m",}`, `byte 13 is '}', where a name in quotation marks should be`},
		{JSON, `{"model" "m"}`, `byte 9 is '"', where ":" should be`},
		{JSON, `{"model":"m","tokens":[1]} {}`, "something follows"},
		{JSON, `{"model":"\ud800","tokens":[1]}`, "model is not UTF-8"},
		{JSON, `{"model":"\ud800\u0041","tokens":[1]}`, "model is not UTF-8"},
		{JSON, `{"model":"\x41","tokens":[1]}`, "escape that is none"},
		{JSON, "{\"model\":\"a\nb\",\"tokens\":[1]}", "byte 11 is 0xa"},
		{JSON, `{"model":nul,"tokens":[1]}`, `byte 9 is 'n', where a value should be`},
		{JSON, `{"model":"m","hashes":[1.3226331709069119e+19]}`, "send it as text in decimal digits"},
		{JSON, `{"model":"m","tokens":[1`, "too early"},
		{JSON, "\xef\xbb\xbf{}", "where a value should be"},
	} {
		_, failure := Handler{Indexer: &echo{}}.Handle(context.Background(), ops.Find, c.contentType, []byte(c.body))
		if failure == nil || !strings.Contains(failure.Message, c.want) || strings.Contains(failure.Message, "Go ") {
			t.Errorf("%s %q: %v, want %q", c.contentType, c.body, failure, c.want)
		}
	}
}

// TestNodesUnderstandNewerOnes: a request of another node may have unknown fields, in the query and in its parts.
func TestNodesUnderstandNewerOnes(t *testing.T) {
	want := Query{Model: "m", Hashed: []Hashed{{2, Hashes{7}}}, Partitions: []events.Partition{3},
		MinSeq: []PartitionSeq{{3, 9}}, Idle: true}
	const text = `{"newer":{"a":[1,{}]},"model":"m","hashed":[{"lookahead":2,"salted":true,"hashes":[7]}],"partitions":[3],"min_seq":[{"partition":3,"seq":9,"at":null}],"idle":true}`
	for contentType, body := range map[string][]byte{JSON: []byte(text), MsgPack: packed(t, text)} {
		e := &echo{}
		if _, failure := (Handler{Indexer: e, IgnoreUnknown: true}).Handle(context.Background(), ops.Find, contentType,
			body); failure != nil || !reflect.DeepEqual(*e.last, want) {
			t.Errorf("%s: %+v, %v", contentType, e.last, failure)
		}
		if _, failure := (Handler{Indexer: e}).Handle(context.Background(), ops.Find, contentType,
			body); failure == nil || !strings.Contains(failure.Message, `"newer"`) {
			t.Errorf("%s: a client's is answered with %v", contentType, failure)
		}
	}
	// In the packed form, with all known fields after an unknown one, the fast path decodes the query.
	body, _ := Marshal(MsgPack, &want)
	body[0]++
	body = append(body, "\xa5newer\x92\x01\xc0"...)
	var q Query
	if !unpackQuery(body, &q, ignoreUnknown) || !reflect.DeepEqual(q, want) {
		t.Errorf("%+v", q)
	}
}

// twinQuery decodes a query in JSON with the standard library; nil: the query is invalid.
func twinQuery(data []byte) map[string]any {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	var m map[string]any
	if !json.Valid(data) || dec.Decode(&m) != nil {
		return nil
	}
	return m
}

// FuzzReadJSON: an accepted query is JSON, and equals the query decoded by the standard library.
func FuzzReadJSON(f *testing.F) {
	for seed := range uint64(30) {
		q := randomQuery(rand.New(rand.NewPCG(seed, 13)))
		q.BlockSize, q.L3TimeoutMS = 0, 0
		if text, err := json.Marshal(q); err == nil && len(text) < 4000 {
			f.Add(text)
		}
	}
	f.Add(
		[]byte(
			`{"model":"\ud83d\ude00\u0000\/","hashes":["-1", -1 ,"18446744073709551615"],"min_seq":[{"seq":"1","partition":2}]}`))
	f.Add([]byte(`{"model":"m","tokens":[` + strings.Repeat("7, 12345,0,99999999,", 40) + `4294967295]}`))
	f.Add([]byte(`{"a":{"b":[1e5,-0.5,true,null,"\n"]},"model":"m"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, unknown := range []unknownFields{refuseUnknown, ignoreUnknown} {
			var q Query
			if err := (Handler{IgnoreUnknown: unknown == ignoreUnknown}).readQuery(JSON, data, &q); err != nil {
				if !utf8.ValidString(err.Error()) {
					t.Fatalf("%q: %q is not UTF-8", data, err)
				}
				continue
			}
			twin := twinQuery(data)
			if twin == nil {
				t.Fatalf("%q is read as %+v", data, q)
			}
			text := func(name, got string) {
				want, _ := twin[name].(string)
				if got != want {
					t.Fatalf("%q: %s is read as %q, is %q", data, name, got, want)
				}
			}
			text("model", q.Model)
			text("lora_name", q.LoRA)
			text("cache_salt", q.CacheSalt)
			text("l3", string(q.L3))
			list := func(name string, got []string) {
				want, _ := twin[name].([]any)
				if len(got) != len(want) || (got == nil) != (want == nil) {
					t.Fatalf("%q: %s is read as %v", data, name, got)
				}
				for i := range want {
					if w := fmt.Sprint(want[i]); w != got[i] && !(w == "-0" && got[i] == "0") {
						t.Fatalf("%q: %s[%d] is read as %s, is %s", data, name, i, got[i], w)
					}
				}
			}
			list("tokens", shownAs(q.Tokens, func(int, uint32) string { return "" }))
			list("workers", shownAs(q.Workers, func(int, events.WorkerID) string { return "" }))
			list("partitions", shownAs(q.Partitions, func(int, events.Partition) string { return "" }))
			hashes, _ := twin["hashes"].([]any)
			list("hashes", shownAs(q.Hashes, func(i int, h uint64) string {
				if i < len(hashes) && strings.HasPrefix(fmt.Sprint(hashes[i]), "-") {
					return strconv.FormatInt(int64(h), 10)
				}
				return ""
			}))
			if places, _ := twin["min_seq"].([]any); len(places) != len(q.MinSeq) {
				t.Fatalf("%q: %v", data, q.MinSeq)
			}
		}
	})
}

// shownAs returns a list as text; nil stays nil. as may replace the text of an element.
func shownAs[T any](list []T, as func(int, T) string) []string {
	if list == nil {
		return nil
	}
	out := []string{}
	for i, v := range list {
		s := as(i, v)
		if s == "" {
			s = fmt.Sprint(v)
		}
		out = append(out, s)
	}
	return out
}

// TestTextAsBytes: text in MessagePack may be bytes, as from some writers.
func TestTextAsBytes(t *testing.T) {
	body, err := msgpack.Marshal(map[string]any{
		"model": []byte("m"), "workers": []any{[]byte("w")}, "hashes": []uint64{1},
	})
	if err != nil {
		t.Fatal(err)
	}
	var q Query
	want := Query{Model: "m", Workers: []events.WorkerID{"w"}, Hashes: Hashes{1}}
	if err := Unmarshal(MsgPack, body, &q); err != nil || !reflect.DeepEqual(q, want) {
		t.Errorf("%+v, %v", q, err)
	}
}

// FuzzReadMsgPack: a query that both readers accept is equal. A query that only the fast reader refuses is left to the
// general reader.
func FuzzReadMsgPack(f *testing.F) {
	for seed := range uint64(20) {
		if b, _ := Marshal(MsgPack, randomQuery(rand.New(rand.NewPCG(seed, 14)))); len(b) < 4000 {
			f.Add(b)
		}
	}
	f.Add([]byte("\x82\xa5model\xa1m\xa6hashes\x93\xff\xd3\xff\xff\xff\xff\xff\xff\xff\xfb\xa212"))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, unknown := range []unknownFields{refuseUnknown, ignoreUnknown} {
			var fast, careful Query
			taken := unpackQuery(data, &fast, unknown)
			err := (&reader{unknown: unknown}).read(MsgPack, data, &careful)
			if taken && (err != nil || !reflect.DeepEqual(fast, careful)) {
				t.Fatalf("%x: %+v, but %+v, %v", data, fast, careful, err)
			}
			if err != nil && !utf8.ValidString(err.Error()) {
				t.Fatalf("%x: %q", data, err)
			}
		}
	})
}

// TestDigits compares digits read eight at a time with digits read one by one, for texts with all kinds of ends.
func TestDigits(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	twin := func(text string, long bool) (uint64, int) {
		n, most := 0, 8
		for n < len(text) && '0' <= text[n] && text[n] <= '9' {
			n++
		}
		if long {
			most = 24
		}
		v, err := strconv.ParseUint(text[:min(n, most)], 10, 64)
		if err != nil || min(n, most) == len(text) {
			return 0, 0
		}
		return v, min(n, most)
	}
	for range testkit.Rounds(300_000) {
		b := make([]byte, rng.IntN(40))
		for i := range b {
			b[i] = byte('0' + rng.IntN(10))
		}
		if len(b) > 0 && rng.IntN(4) > 0 {
			b[rng.IntN(len(b))] = byte(rng.IntN(256))
		}
		text := string(b)
		if rng.IntN(2) == 0 {
			text = fmt.Sprint(rng.Uint64()>>rng.IntN(64)) + []string{",", "]", ",1", "", " "}[rng.IntN(5)] + text
		}
		if rng.IntN(20) == 0 {
			text = fmt.Sprint("1844674407370955161", rng.IntN(10), ",", text)
		}
		for _, long := range []bool{false, true} {
			v, n := digitsOf([]byte(text), long)
			if want, digits := twin(text, long); n != digits || n > 0 && v != want {
				t.Fatalf("%q: %d, %d digits, want %d, %d digits", text, v, n, want, digits)
			}
		}
	}
}

// TestTokensAgainstJSON compares lists of tokens, in all valid forms and some invalid ones, with the standard library.
func TestTokensAgainstJSON(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 3))
	taken := 0
	for i := range 20_000 {
		separators := [][]string{{","}, {", "}, {",", ", ", " ,", ",\n", ",  "}}[rng.IntN(3)]
		most, bits := 20, 34
		if i%16 == 0 { // long lists, most of them of short numbers
			most, bits = 3000, 17+rng.IntN(18)
		}
		text := []byte("[")
		for i := range rng.IntN(most) {
			if i > 0 {
				text = append(text, separators[rng.IntN(len(separators))]...)
			}
			text = strconv.AppendUint(text, rng.Uint64()>>(64-bits+rng.IntN(bits)), 10)
		}
		b := append(text, ']')
		if rng.IntN(3) == 0 {
			b[rng.IntN(len(b))] = "0123456789, -.]\"\x00\xff"[rng.IntN(18)]
		}
		var want []uint32
		refused := json.Unmarshal(b, &want)
		s := &jsonSource{data: b}
		got, err := Tokens(nil), s.unexpected("a list")
		if s.kind() == kindList {
			if got, err = s.tokens("tokens"); err == nil {
				err = s.checkEnd()
			}
		}
		if (err == nil) != (refused == nil) || err == nil && !slices.Equal(got, want) {
			t.Fatalf("%q is read as %v (%v), is %v (%v)", b, got, err, want, refused)
		}
		if err == nil {
			taken++
		}
	}
	if taken < 10_000 {
		t.Errorf("only %d lists were accepted", taken)
	}
}

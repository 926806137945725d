package conductor

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestProfile compares root digests with the values in the conductor's own tests.
func TestProfile(t *testing.T) {
	for algorithm, want := range map[string]string{
		"sha256_cbor": "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
		"sha256":      "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c",
	} {
		if got := root(algorithm, "0"); got != want {
			t.Errorf("%s begins with %s, not %s", algorithm, got, want)
		}
	}
	for seed, good := range map[string]bool{
		"0": true, "random": true, "4294967295": true, "4294967296": false, "-1": false, "+1": false, "1_0": false,
		"000000000000000000000000000000": false, "Random": false, "١": false,
	} {
		text, _ := json.Marshal(map[string]string{"strategy": "vllm_v1", "algorithm": "sha256", "python_hash_seed": seed,
			"index_projection": "low64_be"})
		var r *refusal
		_, err := fields{"hash_profile": text}.profile()
		if errors.As(err, &r) == good || !good && (r.Field != "python_hash_seed" || r.Reason != "invalid_value") {
			t.Errorf("seed %q: %v", seed, err)
		}
	}
}

// TestSGLangProfile checks the combinations of strategy, algorithm, projection and seed. The statuses and fields are
// those of ResolveHashProfile and ParseHashProfile in Mooncake's conductor.
func TestSGLangProfile(t *testing.T) {
	const raw, first = `"algorithm":"sha256_raw"`, `"index_projection":"first64_be"`
	zeros := strings.Repeat("0", 64)
	for _, c := range []struct {
		profile       string
		reason, field string // empty for a valid profile
	}{
		{`{"strategy":"sglang",` + raw + `,` + first + `}`, "", ""},
		{`{"strategy":"sglang_bigram",` + raw + `,` + first + `}`, "", ""},
		{`{"strategy":"sglang",` + raw + `,` + first + `,"python_hash_seed":"0"}`, "", ""},
		{`{"strategy":"sglang",` + raw + `,` + first + `,"python_hash_seed":""}`, "", ""},
		{`{"strategy":"sglang",` + raw + `,` + first + `,"python_hash_seed":"any"}`, "", ""},
		{`{"strategy":"sglang",` + raw + `,` + first + `,"python_hash_seed":0}`, "invalid_type", "python_hash_seed"},
		{`{"strategy":"sglang",` + raw + `,` + first + `,"python_hash_seed":null}`, "invalid_type", "python_hash_seed"},
		{`{"strategy":"sglang",` + raw + `,` + first + `,"root_digest":"00"}`, "unknown_field", "root_digest"},
		{`{"strategy":"sglang","algorithm":"sha256",` + first + `}`, "invalid_value", "algorithm"},
		{`{"strategy":"sglang","algorithm":"sha256_cbor",` + first + `}`, "invalid_value", "algorithm"},
		{`{"strategy":"sglang",` + first + `}`, "missing", "algorithm"},
		{`{"strategy":"sglang_bigram",` + raw + `,"index_projection":"low64_be"}`, "invalid_value", "index_projection"},
		{`{"strategy":"sglang_bigram",` + raw + `}`, "missing", "index_projection"},
		{`{"strategy":"SGLang",` + raw + `,` + first + `,"python_hash_seed":"0"}`, "invalid_value", "strategy"},
		{`{"strategy":"vllm_v1",` + raw + `,` + first + `,"python_hash_seed":"0"}`, "invalid_value", "algorithm"},
		{`{"strategy":"vllm_v1","algorithm":"sha256",` + first + `,"python_hash_seed":"0"}`, "invalid_value",
			"index_projection"},
		{`{"strategy":"vllm_v1","algorithm":"sha256","index_projection":"low64_be"}`, "missing", "python_hash_seed"},
		{`{"strategy":"vllm_v1","algorithm":"sha256","index_projection":"low64_be","python_hash_seed":""}`,
			"invalid_value", "python_hash_seed"},
	} {
		var r *refusal
		p, err := fields{"hash_profile": json.RawMessage(c.profile)}.profile()
		if !errors.As(err, &r) {
			r = &refusal{}
		}
		if r.Reason != c.reason || r.Field != c.field || err != nil && r.status != http.StatusBadRequest {
			t.Errorf("%s: %+v; want %s of %q", c.profile, r, c.reason, c.field)
		}
		if err == nil && (p.Seed != "0" || p.Root != zeros) {
			t.Errorf("%s: %+v", c.profile, p)
		}
	}
}

// TestTokens checks that the error names the index of an invalid element.
func TestTokens(t *testing.T) {
	for _, c := range []struct {
		tokens, reason string
		index          int // -1 without an error
	}{
		{`[]`, "", -1}, {`[0, 2147483647]`, "", -1}, {`7`, "not_array", -1}, {`null`, "not_array", -1},
		{`[1,"2"]`, "invalid_type", 1}, {`[1.5]`, "invalid_type", 0}, {`[1,2,null]`, "invalid_type", 2},
		{`[1,[2]]`, "invalid_type", 1}, {`[1e3]`, "invalid_type", 0}, {`[true]`, "invalid_type", 0},
		{`[2147483648]`, "out_of_range", 0}, {`[0,-1]`, "out_of_range", 1}, {`[0,1,-2147483649]`, "out_of_range", 2},
		{`[0,18446744073709551616]`, "invalid_type", 1},
	} {
		_, err := fields{"token_ids": json.RawMessage(c.tokens)}.tokens()
		var r *refusal
		if !errors.As(err, &r) {
			r = &refusal{}
		}
		if index := r.Index; r.Reason != c.reason || (index == nil) != (c.index < 0) || index != nil && *index != c.index {
			t.Errorf("%s: %+v", c.tokens, r)
		}
	}
	if _, err := (fields{}).tokens(); err == nil || err.(*refusal).Reason != "missing" {
		t.Errorf("no tokens: %v", err)
	}
}

// FuzzRequests checks that every field of any body has a value or is refused with a reason.
func FuzzRequests(f *testing.F) {
	f.Add([]byte(`{"model":"m","block_size":16,"token_ids":[1,2],"tenant_id":"","cache_salt":null,"instance_id":"a"}`))
	f.Add([]byte(`{"endpoint":"tcp://h:1","dp_rank":0,"cache_group":0,"hash_profile":{"strategy":"vllm_v1",` +
		`"algorithm":"sha256","python_hash_seed":"0","index_projection":"low64_be"}}`))
	known := []string{"model", "block_size", "token_ids", "tenant_id", "cache_salt", "instance_id", "endpoint", "dp_rank",
		"cache_group", "hash_profile"}
	f.Fuzz(func(t *testing.T, body []byte) {
		in, err := open(body, known...)
		errs := []error{err}
		if err == nil {
			for _, read := range []func() error{
				func() error { _, err := in.text("model"); return err },
				func() error { _, err := in.text("endpoint"); return err },
				func() error { _, err := in.blockSize(); return err },
				func() error { _, err := in.tokens(); return err },
				func() error { _, err := in.tenant(); return err },
				func() error { _, err := in.salt(); return err },
				func() error { _, err := in.instance(); return err },
				func() error { _, err := in.rank(); return err },
				func() error { _, err := in.cacheGroup(); return err },
				func() error { _, err := in.profile(); return err },
			} {
				errs = append(errs, read())
			}
		}
		for _, err := range errs {
			var r *refusal
			if err != nil && (!errors.As(err, &r) || r.Reason == "" || r.status/100 != 4) {
				t.Errorf("%q: %v", body, err)
			}
		}
	})
}

// TestPack checks that MessagePack has the values of the JSON text, with all numbers as integers.
func TestPack(t *testing.T) {
	packed, err := pack([]byte(`{"b":[1,-1,null,true,"x",{}],"a":9007199254740993}`))
	if want := "\x82\xa1a\xcf\x00\x20\x00\x00\x00\x00\x00\x01\xa1b\x96\x01\xff\xc0\xc3\xa1x\x80"; err != nil ||
		string(packed) != want {
		t.Errorf("%q, %v; want %q", packed, err, want)
	}
	text, err := api.ObjectJSON([]byte("\x82\xa1t\xc4\x08\x01\x00\x00\x00\xff\xff\xff\xff\xa1e\xc4\x00"))
	if err != nil || string(text) != `{"t":[1,-1],"e":[]}` {
		t.Errorf("%s, %v", text, err)
	}
	for _, bad := range []string{"", "\x90", "\x81\xa1t", "\x80\x80", "\x81\xa1t\xc4\x03abc", "\x81\x01\x01"} {
		if text, err := api.ObjectJSON([]byte(bad)); err == nil {
			t.Errorf("%q is %s", bad, text)
		}
	}
}

package conductor

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// refusal is an error in the form of the conductor's replies.
type refusal struct {
	status int
	code   api.Code // for the metric of outcomes

	Message string `json:"error"` // the whole body, if there is no reason
	Reason  string `json:"reason"`
	Field   string `json:"field,omitempty"`
	Index   *int   `json:"index,omitempty"` // in a list
}

func (r *refusal) Error() string { return r.Message }

// refuse returns the error of an invalid request.
func refuse(reason, field, format string, args ...any) error {
	return &refusal{status: http.StatusBadRequest, code: api.CodeMalformed, Message: fmt.Sprintf(format, args...),
		Reason: reason, Field: field}
}

// fields are the members of a JSON object.
type fields map[string]json.RawMessage

// open reads a JSON object and refuses unknown fields.
func open(body []byte, known ...string) (fields, error) {
	f := fields{}
	err := api.Members(body, func(name string, value []byte) error {
		if f[name] != nil {
			return refuse("duplicate_field", name, "request field is given twice: %s", name)
		}
		f[name] = value
		return nil
	})
	if e, is := errors.AsType[*api.Error](err); is {
		return nil, refuse("invalid_json", "", "Invalid JSON object: %s", e.Message)
	} else if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(f)) {
		if !slices.Contains(known, name) {
			return nil, refuse("unknown_field", name, "unsupported request field: %s", name)
		}
	}
	return f, nil
}

// text returns a required field with text that is not empty.
func (f fields) text(name string) (string, error) {
	if f[name] == nil {
		return "", refuse("missing", name, "%s is required", name)
	}
	s, err := f.optional(name, "")
	if err == nil && s == "" {
		return "", refuse("invalid_value", name, "%s must not be empty", name)
	}
	return s, err
}

// optional returns a field with text, or otherwise if the field is missing.
func (f fields) optional(name, otherwise string) (string, error) {
	if f[name] == nil {
		return otherwise, nil
	}
	var s *string
	if json.Unmarshal(f[name], &s) != nil || s == nil {
		return "", refuse("invalid_type", name, "%s must be a string", name)
	}
	return *s, nil
}

// tenant returns the tenant of a request.
func (f fields) tenant() (string, error) {
	s, err := f.optional("tenant_id", "")
	if s == "" {
		s = compat.DefaultGroup
	}
	return s, err
}

// whole returns a required field with a whole number.
func (f fields) whole(name string) (int64, error) {
	if f[name] == nil {
		return 0, refuse("missing", name, "%s is required", name)
	}
	v, err := strconv.ParseInt(string(f[name]), 10, 64)
	if err != nil {
		return 0, refuse("invalid_type", name, "%s must be an integer", name)
	}
	return v, nil
}

// blockSize returns the field block_size.
func (f fields) blockSize() (int64, error) {
	v, err := f.whole("block_size")
	if err == nil && v <= 0 {
		return 0, refuse("out_of_range", "block_size", "block_size must be greater than zero")
	}
	return v, err
}

// rank returns the field dp_rank.
func (f fields) rank() (events.Rank, error) {
	v, err := f.whole("dp_rank")
	if err == nil && (v < 0 || v > math.MaxInt32) {
		return 0, refuse("out_of_range", "dp_rank", "dp_rank must be a non-negative int")
	}
	return events.Rank(v), err
}

// tokens returns the field token_ids.
func (f fields) tokens() (api.Tokens, error) {
	const name = "token_ids"
	switch {
	case f[name] == nil:
		return nil, refuse("missing", name, "token_ids is required")
	case f[name][0] != '[':
		return nil, refuse("not_array", name, "token_ids must be an array")
	}
	tokens, err := api.ReadTokens(name, f[name])
	if e, is := errors.AsType[*api.Error](err); is && e.Code == api.CodeTooLarge {
		return nil, &refusal{status: http.StatusRequestEntityTooLarge, code: e.Code, Message: e.Message,
			Reason: "out_of_range", Field: name}
	}
	if err == nil && !slices.ContainsFunc(tokens, func(t uint32) bool { return t > math.MaxInt32 }) {
		return tokens, nil
	}
	var list []json.RawMessage
	if err := json.Unmarshal(f[name], &list); err != nil {
		return nil, refuse("not_array", name, "token_ids must be an array: %v", err)
	}
	for i, element := range list {
		what, reason := "must be a JSON integer", "invalid_type"
		v, err := strconv.ParseInt(string(element), 10, 64)
		switch {
		case err == nil && v >= 0 && v <= math.MaxInt32:
			continue
		case err == nil && v < 0 && v >= math.MinInt32:
			what, reason = "is negative, which no engine's token is", "out_of_range"
		case err == nil:
			what, reason = "is outside the int32 range", "out_of_range"
		}
		r := refuse(reason, name, "token_ids element %s", what).(*refusal)
		r.Index = &i
		return nil, r
	}
	return nil, err
}

// profile describes the block hashes of an engine.
type profile struct {
	Strategy   string `json:"strategy"`
	Algorithm  string `json:"algorithm"`
	Seed       string `json:"python_hash_seed"`
	Root       string `json:"root_digest"` // of the seed, in hexadecimal
	Projection string `json:"index_projection"`
}

// sglang reports whether the strategy belongs to SGLang. SGLang's strategies have no seed.
func (p *profile) sglang() bool { return p.Strategy == "sglang" || p.Strategy == "sglang_bigram" }

// profile returns the field hash_profile. The rules are equal to ResolveHashProfile in Mooncake's
// mooncake-conductor/src/prefixindex/hash_strategy.cpp.
func (f fields) profile() (p profile, err error) {
	const name = "hash_profile"
	switch {
	case f[name] == nil:
		return p, refuse("missing", name, "hash_profile is required")
	case f[name][0] != '{':
		return p, refuse("invalid_type", name, "hash_profile must be an object")
	}
	in, err := open(f[name], "strategy", "algorithm", "python_hash_seed", "index_projection")
	if err != nil {
		return p, err
	}
	for _, field := range []struct {
		name string
		to   *string
	}{{"strategy", &p.Strategy}, {"algorithm", &p.Algorithm}, {"index_projection", &p.Projection}} {
		if *field.to, err = in.text(field.name); err != nil {
			return p, err
		}
	}
	const seed = "python_hash_seed"
	if p.sglang() {
		switch _, err := in.optional(seed, ""); { // the value is ignored
		case err != nil:
			return p, err
		case p.Algorithm != "sha256_raw":
			return p, refuse("invalid_value", "algorithm", "unsupported SGLang hash algorithm: %s", p.Algorithm)
		case p.Projection != "first64_be":
			return p, refuse("invalid_value", "index_projection", "unsupported SGLang index projection: %s", p.Projection)
		}
		p.Seed, p.Root = "0", strings.Repeat("0", 2*sha256.Size) // placeholders, as in the conductor
		return p, nil
	}
	if p.Seed, err = in.text(seed); err != nil {
		return p, err
	}
	_, err = strconv.ParseUint(p.Seed, 10, 32)
	digits := p.Seed[0] >= '0' && p.Seed[0] <= '9'
	switch {
	case p.Strategy != "vllm_v1":
		return p, refuse("invalid_value", "strategy", "unsupported hash strategy: %s", p.Strategy)
	case p.Algorithm != "sha256_cbor" && p.Algorithm != "sha256":
		return p, refuse("invalid_value", "algorithm", "unsupported hash algorithm: %s", p.Algorithm)
	case p.Projection != "low64_be":
		return p, refuse("invalid_value", "index_projection", "unsupported index projection: %s", p.Projection)
	case p.Seed != "random" && (err != nil || !digits || len(p.Seed) > 23):
		return p, refuse("invalid_value", seed,
			"python_hash_seed must be random or a decimal number of 32 bits")
	}
	p.Root = root(p.Algorithm, p.Seed)
	return p, nil
}

// root returns the first hash of vLLM's chain in hexadecimal: the digest of the seed. The seed is a short text, encoded
// as CBOR or as a Python pickle (protocol 5).
func root(algorithm, seed string) string {
	encoded := append([]byte{0x60 | byte(len(seed))}, seed...)
	if algorithm == "sha256" {
		frame := append([]byte{0x8c, byte(len(seed))}, seed...)
		frame = append(frame, 0x94, '.')
		encoded = binary.LittleEndian.AppendUint64([]byte{0x80, 5, 0x95}, uint64(len(frame)))
		encoded = append(encoded, frame...)
	}
	sum := sha256.Sum256(encoded)
	return hex.EncodeToString(sum[:])
}

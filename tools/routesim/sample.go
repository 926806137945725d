package routesim

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"

	"github.com/kvatlas/kvatlas/tools/trace"
)

// sample is a file of requests without times. A request has a session, a number of tokens and a list of hash ids. A
// hash id stands for 512/scale tokens.
type sample struct {
	Scale    int                 `json:"scale"`
	Requests [][]json.RawMessage `json:"requests"`
}

// readTrace reads a trace of at most limit requests; 0 reads all. A sample gets arrivals of a Poisson process, and sets
// the tokens of a hash id.
func readTrace(file string, limit int, blockTokens *int, seed uint64) ([]trace.Request, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var s sample
	if json.Unmarshal(text, &s) != nil || s.Requests == nil {
		return trace.ReadFile(file, limit)
	}
	if s.Scale < 1 || trace.BlockTokens%s.Scale != 0 {
		return nil, fmt.Errorf("%s: scale %d does not divide %d", file, s.Scale, trace.BlockTokens)
	}
	*blockTokens = trace.BlockTokens / s.Scale
	rng := rand.New(rand.NewPCG(seed, 0x73616d706c65))
	at := 0.0
	var list []trace.Request
	for i, fields := range s.Requests {
		if len(list) == limit && limit > 0 {
			break
		}
		r, err := parseSample(fields)
		if err != nil {
			return nil, fmt.Errorf("%s: request %d: %w", file, i, err)
		}
		r.Timestamp = int64(at)
		at += 1000 * rng.ExpFloat64()
		list = append(list, r)
	}
	return list, nil
}

// sampleOutput is the length of answers in a sample, which has no lengths.
const sampleOutput = 16

func parseSample(fields []json.RawMessage) (trace.Request, error) {
	r := trace.Request{OutputLength: sampleOutput}
	if len(fields) != 3 {
		return r, fmt.Errorf("%d fields: there must be session, tokens and hash ids", len(fields))
	}
	var session any
	err := errors.Join(json.Unmarshal(fields[0], &session), json.Unmarshal(fields[1], &r.InputLength),
		json.Unmarshal(fields[2], &r.HashIDs))
	if err == nil && r.InputLength < 1 {
		err = fmt.Errorf("%d tokens", r.InputLength)
	}
	r.SessionID = fmt.Sprint(session)
	return r, err
}

package routesim

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
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

// readTrace reads a trace of at most limit requests; 0 reads all. An empty format is detected. A file without times
// gets arrivals of a Poisson process. readTrace sets the tokens of a hash id, unless they are given, and writes a
// detected format to w.
func readTrace(file, format string, limit int, blockTokens *int, seed uint64, w io.Writer) ([]trace.Request, error) {
	rng := rand.New(rand.NewPCG(seed, 0x73616d706c65))
	s, err := readSample(file, format)
	if err != nil {
		return nil, err
	}
	if s == nil {
		t, err := trace.ImportFile(file, trace.Format(format), limit)
		if err != nil {
			return nil, err
		}
		if t.Untimed {
			arrive(t.Requests, rng)
		}
		*blockTokens = cmp.Or(*blockTokens, t.Tokens)
		if err := t.CheckTokens(*blockTokens); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if format == "" {
			fmt.Fprintf(w, "%s is read as %s, with %d tokens a hash id (--trace-format, --block-tokens)\n", file, t.Format,
				*blockTokens)
		}
		return t.Requests, nil
	}
	if s.Scale < 1 || trace.BlockTokens%s.Scale != 0 {
		return nil, fmt.Errorf("%s: scale %d does not divide %d", file, s.Scale, trace.BlockTokens)
	}
	*blockTokens = trace.BlockTokens / s.Scale
	var list []trace.Request
	for i, fields := range s.Requests {
		if len(list) == limit && limit > 0 {
			break
		}
		r, err := parseSample(fields)
		if err != nil {
			return nil, fmt.Errorf("%s: request %d: %w", file, i, err)
		}
		list = append(list, r)
	}
	arrive(list, rng)
	return list, nil
}

// doubts returns sentences about requests whose simulation is probably wrong. outputs means that the lengths of answers
// are given elsewhere.
func doubts(list []trace.Request, outputs bool) (lines []string) {
	const root = math.MaxUint64 // before the first id of a prompt
	before, mixed, answers := map[uint64]uint64{}, map[uint64]bool{}, outputs
	for i := range list {
		answers = answers || list[i].OutputLength > 0
		last := uint64(root)
		for _, id := range list[i].HashIDs {
			if of, found := before[id]; found && of != last {
				mixed[id] = true
			}
			before[id], last = last, id
		}
	}
	if !answers {
		lines = append(lines, "no request has an output_length above 0, so every answer has one token; --output-tokens sets "+
			"another length")
	}
	if len(mixed) > 0 {
		lines = append(lines, fmt.Sprintf("%d of %d hash ids follow different ids: an id must stand for its tokens and all "+
			"earlier tokens, otherwise the reuse is wrong", len(mixed), len(before)))
	}
	return lines
}

// arrive sets the times of a Poisson process with a request a second.
func arrive(list []trace.Request, rng *rand.Rand) {
	at := 0.0
	for i := range list {
		list[i].Timestamp = int64(at)
		at += 1000 * rng.ExpFloat64()
	}
}

// maxSample bounds a file that may be a sample, in bytes.
const maxSample = 1 << 30

// readSample reads a file with a sample; nil: the file has another form.
func readSample(file, format string) (*sample, error) {
	info, err := os.Stat(file)
	if err != nil || format != "" || info.Size() > maxSample {
		return nil, err
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var s sample
	if json.Unmarshal(text, &s) != nil || len(s.Requests) == 0 || s.Scale == 0 {
		return nil, nil
	}
	return &s, nil
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

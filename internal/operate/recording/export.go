package recording

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/usage"
)

// Format is a form of exported requests.
type Format string

// The formats.
const (
	// Mooncake is the trace format of kvcache-ai/Mooncake (FAST25-release/traces), with a JSON object for each request.
	Mooncake Format = "mooncake"
	// JSON has all fields of a request, with a JSON object for each request.
	JSON Format = "json"
)

// MooncakeTokens is the number of tokens of a hash id in Mooncake's traces.
const MooncakeTokens = 512

// Exporter writes requests to a writer. Ids of prompts and sessions are numbers in order of their first use, so two
// exports have no ids in common.
type Exporter struct {
	w        *bufio.Writer
	format   Format
	tokens   uint32 // of a hash id
	begin    int64
	model    string
	next     uint64 // the next id
	ids      map[Name]uint64
	sessions map[Name]uint64

	Requests, WithoutOutput uint64
}

// NewExporter returns an exporter. tokens is the number of tokens of a hash id; 0: [MooncakeTokens].
func NewExporter(w io.Writer, format Format, tokens uint32) (*Exporter, error) {
	if format != Mooncake && format != JSON {
		return nil, fmt.Errorf("format %q is none of mooncake, json", format)
	}
	if tokens == 0 {
		tokens = MooncakeTokens
	}
	return &Exporter{w: bufio.NewWriter(w), format: format, tokens: tokens, ids: map[Name]uint64{},
		sessions: map[Name]uint64{}}, nil
}

// ExportSettings are the settings of an export, as texts.
type ExportSettings struct {
	Since, Until string // see [ParseMoment]; empty: all requests, and now
	Model        string // empty: all models
	Format       Format
	Tokens       uint32 // of a hash id
}

// Check adds the errors of the settings to wrong.
func (x *ExportSettings) Check(wrong *usage.Complaints) {
	wrong.When(x.Tokens == 0, "--block-tokens is 0")
	_, err := NewExporter(io.Discard, x.Format, x.Tokens)
	wrong.About("--format", err)
	f, err := x.filter(time.Now())
	*wrong = append(*wrong, err)
	wrong.When(err == nil && !f.Until.IsZero() && !f.Since.Before(f.Until), "--until is not after --since")
}

// Export writes the selected requests of a source to a writer.
func (x *ExportSettings) Export(ctx context.Context, from Source, w io.Writer) (*Exporter, Summary, error) {
	f, err := x.filter(time.Now())
	if err != nil {
		return nil, Summary{}, err
	}
	return Export(ctx, from, f, w, x.Format, x.Tokens)
}

// filter returns the selection of requests. now is the end of the durations in Since and Until.
func (x *ExportSettings) filter(now time.Time) (f Filter, err error) {
	var wrong usage.Complaints
	f.Model = x.Model
	f.Since, err = ParseMoment(x.Since, now)
	wrong.About("--since", err)
	f.Until, err = ParseMoment(x.Until, now)
	wrong.About("--until", err)
	return f, errors.Join(wrong...)
}

// Export writes the selected requests of a source to a writer. The exporter has the counts of the written requests.
func Export(
	ctx context.Context, from Source, f Filter, w io.Writer, format Format, tokens uint32,
) (*Exporter, Summary, error) {
	e, err := NewExporter(w, format, tokens)
	if err != nil {
		return nil, Summary{}, err
	}
	sum, err := Read(ctx, from, f, e.Write)
	return e, sum, errors.Join(err, e.Flush())
}

// ParseMoment parses a time, or a duration before now. The empty text is the zero time.
func ParseMoment(text string, now time.Time) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(text); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return at, fmt.Errorf("%q is neither a duration such as 1h nor a time such as 2026-11-27T08:00:00Z", text)
	}
	return at, nil
}

// mooncakeLine is a request in Mooncake's format. session_id is an addition.
type mooncakeLine struct {
	Timestamp    int64    `json:"timestamp"` // milliseconds since the first request
	InputLength  uint64   `json:"input_length"`
	OutputLength uint64   `json:"output_length"`
	HashIDs      []uint64 `json:"hash_ids"`
	SessionID    string   `json:"session_id,omitempty"`
}

// Line is a request in the format JSON. Depths are in blocks, and times in milliseconds.
type Line struct {
	mooncakeLine
	HashTokens uint32    `json:"hash_tokens"` // of a hash id
	Time       time.Time `json:"time"`
	Node       string    `json:"node"`
	Model      string    `json:"model"`
	Adapter    string    `json:"adapter,omitempty"` // a keyed hash
	BlockSize  uint32    `json:"block_size"`

	Policy       string  `json:"policy,omitempty"`
	Candidates   uint32  `json:"candidates"`
	Booked       bool    `json:"booked"`
	Refused      bool    `json:"refused,omitempty"`
	Restricted   bool    `json:"restricted,omitempty"` // the request named its workers
	Incomplete   bool    `json:"incomplete,omitempty"`
	EngineHashes bool    `json:"engine_hashes,omitempty"`
	Choice       *Choice `json:"choice,omitempty"`
	Prefill      *Choice `json:"prefill,omitempty"` // of a disaggregated request

	CachedTokens   uint64  `json:"cached_tokens"` // estimated
	ComputedTokens uint64  `json:"computed_tokens"`
	ReportedTokens *uint64 `json:"reported_cached_tokens,omitempty"` // by the engine

	Freed        bool   `json:"freed,omitempty"`
	LifeMS       uint64 `json:"life_ms,omitempty"`
	FirstTokenMS uint64 `json:"first_token_ms,omitempty"`
	OutputKnown  bool   `json:"output_known"` // otherwise output_length is the expectation of the request, or 0
	OutputExact  bool   `json:"output_exact"` // output_length has the tokens by the engine; otherwise whole blocks
}

// Choice is a chosen rank with its state before the choice.
type Choice struct {
	Worker        string `json:"worker"`
	Rank          uint32 `json:"rank"`
	Device        uint32 `json:"device"`
	Host          uint32 `json:"host"`
	Disk          uint32 `json:"disk"`
	Shared        uint32 `json:"shared"`
	Guessed       uint32 `json:"guessed,omitempty"`
	Requests      uint64 `json:"requests"`
	PrefillTokens uint64 `json:"prefill_tokens"`
	Blocks        uint64 `json:"blocks"`
}

func choiceOf(p *Place) *Choice { c := Choice(*p); return &c }

// Write writes a request. It fails if the format cannot represent the request exactly.
func (e *Exporter) Write(q *Joined) error {
	r := &q.Request
	if e.tokens%r.Span != 0 {
		return fmt.Errorf("a request of %s was recorded with a hash for %d tokens, of which %d are no multiple; "+
			"give --block-tokens %d, or record with --record-span of a divisor", r.Model, r.Span, e.tokens, r.Span)
	}
	if e.format == Mooncake && e.model != "" && e.model != r.Model {
		return fmt.Errorf("the recording has the models %s and %s, and the format has no models; give --model", e.model,
			r.Model)
	}
	if e.model = r.Model; e.Requests == 0 {
		e.begin = r.Time
	}
	e.Requests++
	l := Line{mooncakeLine: mooncakeLine{Timestamp: r.Time - e.begin, InputLength: r.Tokens, OutputLength: r.Output,
		HashIDs: e.hashIDs(r)}}
	if r.Session != 0 {
		l.SessionID = "s" + strconv.FormatUint(e.session(r.Session), 10)
	}
	switch {
	case q.Flags&Answered != 0:
		l.OutputLength, l.OutputKnown, l.OutputExact = q.Answer.Tokens, true, true
	case q.Flags&Ended != 0 && q.End.Blocks > 0:
		l.OutputLength, l.OutputKnown = q.End.Blocks*uint64(r.BlockSize), true
	default:
		e.WithoutOutput++
	}
	if e.format == Mooncake {
		return e.line(l.mooncakeLine)
	}
	l.HashTokens, l.Time, l.Node = e.tokens, time.UnixMilli(r.Time).UTC(), q.Node
	l.Model, l.BlockSize = r.Model, r.BlockSize
	l.Policy, l.Candidates, l.EngineHashes = r.Policy, r.Candidates, r.EngineHashes
	l.Booked, l.Refused, l.Restricted = q.Flags&Booked != 0, q.Flags&Refused != 0, q.Flags&Pinned != 0
	l.Incomplete, l.CachedTokens, l.ComputedTokens = q.Flags&Incomplete != 0, r.Cached, r.Computed
	if r.Adapter != 0 {
		l.Adapter = fmt.Sprintf("%016x", uint64(r.Adapter))
	}
	if !l.Refused {
		l.Choice = choiceOf(&r.Place)
	}
	if q.Flags&Disaggregated != 0 {
		l.Prefill = choiceOf(&r.Prefill)
	}
	if q.Flags&Reported != 0 {
		l.ReportedTokens = &q.Report.Cached
	}
	if q.Flags&Ended != 0 {
		l.Freed, l.LifeMS, l.FirstTokenMS = q.Freed, q.Life, q.FirstToken
	}
	return e.line(l)
}

// maxUnnamed bounds the ids of a prompt without names.
const maxUnnamed = 1 << 16

// hashIDs returns the ids of a prompt, in spans of e.tokens. A name covers the whole prompt before it, so the last name
// of each longer span is the name of the span. Tokens without a name get unique ids.
func (e *Exporter) hashIDs(r *Request) []uint64 {
	per := int(e.tokens / r.Span)
	named := (len(r.Names) + per - 1) / per
	all := r.Tokens / uint64(e.tokens)
	if r.Tokens%uint64(e.tokens) > 0 {
		all++
	}
	unnamed := 0
	if all > uint64(named) {
		unnamed = int(min(all-uint64(named), maxUnnamed))
	}
	ids := make([]uint64, 0, named+unnamed)
	for i := range named {
		name := r.Names[min((i+1)*per, len(r.Names))-1]
		id, known := e.ids[name]
		if !known {
			id = e.fresh()
			e.ids[name] = id
		}
		ids = append(ids, id)
	}
	for range unnamed {
		ids = append(ids, e.fresh())
	}
	return ids
}

// fresh returns an unused id.
func (e *Exporter) fresh() uint64 {
	e.next++
	return e.next - 1
}

// session returns the number of a session, in order of the first use.
func (e *Exporter) session(n Name) uint64 {
	id, known := e.sessions[n]
	if !known {
		id = uint64(len(e.sessions))
		e.sessions[n] = id
	}
	return id
}

func (e *Exporter) line(v any) error {
	text, err := json.Marshal(v)
	if err == nil {
		_, err = e.w.Write(append(text, '\n'))
	}
	return err
}

// Flush writes the remaining bytes.
func (e *Exporter) Flush() error { return e.w.Flush() }

package api

import (
	"fmt"
	"strings"
	"time"
	"unicode"
)

// SourceReport has the quiet sources of a shim. Shims of many ranks publish it on the subjects of [EngineLoads]. Shims
// of shared stores publish it on a subject of the store.
type SourceReport struct {
	Sources []QuietSource `json:"sources" msgpack:"sources"`
}

// QuietSource is a source of events without events: it has published no event since the shim's start, or the shim
// cannot connect. The source is of many ranks, such as Dynamo's event plane, or of a shared store. Silence is normal
// without requests.
type QuietSource struct {
	Source  string `json:"source" msgpack:"source"`                       // as in worker-shim run --source
	Engine  string `json:"engine" msgpack:"engine"`                       // address of the source
	Model   string `json:"model" msgpack:"model"`                         // empty: a store's source
	Store   string `json:"store,omitempty" msgpack:"store,omitempty"`     // HTTP address of the store's master
	Host    string `json:"host" msgpack:"host"`                           // of the shim
	PID     int    `json:"pid" msgpack:"pid"`                             // of the shim
	Failure string `json:"failure,omitempty" msgpack:"failure,omitempty"` // connection error; empty: silent
	Advice  string `json:"advice" msgpack:"advice"`                       // what to check
	Spoke   bool   `json:"spoke,omitempty" msgpack:"spoke,omitempty"`     // the state has ended
}

// QuietSourceLife is the validity of a report. Shims repeat the report.
const QuietSourceLife = 30 * time.Second

// maxQuietSources is the largest number of sources in a report.
const maxQuietSources = 256

// MaxSourceText is the largest length of a text in a QuietSource, in bytes.
const MaxSourceText = 1024

// Key returns an identifier of the source among the sources of all shims.
func (q *QuietSource) Key() string {
	return fmt.Sprintf("%s %s %s %d", q.Source, q.Engine, q.Host, q.PID)
}

func (q *QuietSource) String() string {
	of := "model " + q.Model
	if q.Store != "" {
		of = "store " + q.Store
	}
	return fmt.Sprintf("--source %s --engine %s for %s (process %d on %s)", q.Source, q.Engine, of, q.PID, q.Host)
}

// Severe reports whether holdings are out of date during the state: the events of ranks do not arrive. Without a
// store's events, nodes poll the store.
func (q *QuietSource) Severe() bool { return q.Failure != "" && q.Store == "" }

// Line describes the state and its remedy for the problems and warnings of a status.
func (q *QuietSource) Line() string {
	state := fmt.Sprintf("no event since the start from %s", q)
	if q.Failure != "" {
		state = fmt.Sprintf("not reached: %s: %s", q, q.Failure)
	}
	return state + "; what to do: " + q.Advice
}

// Check returns an error for a source without a name, and for texts that are too long or cannot be printed.
func (q *QuietSource) Check() error {
	for _, s := range []string{q.Source, q.Engine, q.Model, q.Store, q.Host, q.Failure, q.Advice} {
		if len(s) > MaxSourceText || strings.ContainsFunc(s, func(c rune) bool { return !unicode.IsPrint(c) }) {
			return fmt.Errorf("%.32q is longer than %d bytes, or has characters that cannot be printed", s, MaxSourceText)
		}
	}
	if q.Source == "" || q.Engine == "" {
		return fmt.Errorf("source or engine is missing")
	}
	return nil
}

// ReadSourceReport decodes a published report, also of a newer version. The error is an [Error].
func ReadSourceReport(contentType string, body []byte) (*SourceReport, error) {
	var s SourceReport
	err := (&reader{unknown: ignoreUnknown, what: "the report"}).read(contentType, body, &s)
	for i := range s.Sources {
		if bad := s.Sources[i].Check(); err == nil && bad != nil {
			err = Errorf(CodeMalformed, "sources[%d]: %v", i, bad)
		}
	}
	return &s, err
}

func (s *SourceReport) members(list []member) []member {
	return append(list, member{"sources", &s.Sources})
}

func (q *QuietSource) members(list []member) []member {
	return append(list, []member{{"source", &q.Source}, {"engine", &q.Engine}, {"model", &q.Model}, {"store", &q.Store},
		{"host", &q.Host}, {"pid", &q.PID}, {"failure", &q.Failure}, {"advice", &q.Advice}, {"spoke", &q.Spoke}}...)
}

package api

import (
	"fmt"
	"strings"
	"time"
	"unicode"
)

// SourceReport is published by shims of many ranks, beside [EngineLoads] and on the same subjects.
type SourceReport struct {
	Sources []QuietSource `json:"sources" msgpack:"sources"`
}

// QuietSource is a source of events of many ranks, such as Dynamo's event plane, that has published no event since its
// shim began. Without requests to its workers that is normal.
type QuietSource struct {
	Source string `json:"source" msgpack:"source"` // as in worker-shim run --source
	Engine string `json:"engine" msgpack:"engine"` // where it is heard
	Model  string `json:"model" msgpack:"model"`
	Host   string `json:"host" msgpack:"host"` // of the shim
	PID    int    `json:"pid" msgpack:"pid"`
	Advice string `json:"advice" msgpack:"advice"`                   // what to check
	Spoke  bool   `json:"spoke,omitempty" msgpack:"spoke,omitempty"` // it has published its first event now
}

// QuietSourceLife is how long a report counts. Shims repeat it.
const QuietSourceLife = 30 * time.Second

// MaxQuietSources is how many a report may have, and a node knows.
const MaxQuietSources = 256

// Key identifies a source among those of all shims.
func (q *QuietSource) Key() string {
	return fmt.Sprintf("%s %s %s %d", q.Source, q.Engine, q.Host, q.PID)
}

func (q *QuietSource) String() string {
	return fmt.Sprintf("--source %s --engine %s for model %s (process %d on %s)", q.Source, q.Engine, q.Model, q.PID,
		q.Host)
}

// Check refuses a source without a name, and texts that do not belong on a terminal.
func (q *QuietSource) Check() error {
	const most = 1024
	for _, s := range []string{q.Source, q.Engine, q.Model, q.Host, q.Advice} {
		if len(s) > most || strings.ContainsFunc(s, func(c rune) bool { return !unicode.IsPrint(c) }) {
			return fmt.Errorf("%.32q is longer than %d bytes, or has characters that cannot be printed", s, most)
		}
	}
	if q.Source == "" || q.Engine == "" {
		return fmt.Errorf("source or engine is missing")
	}
	return nil
}

// ReadSourceReport reads a report that was published, by a shim of a newer version too. The error is an [Error].
func ReadSourceReport(contentType string, body []byte) (*SourceReport, error) {
	var s SourceReport
	err := (&reader{unknown: IgnoreUnknown, what: "the report"}).read(contentType, body, &s)
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
	return append(list, []member{{"source", &q.Source}, {"engine", &q.Engine}, {"model", &q.Model}, {"host", &q.Host},
		{"pid", &q.PID}, {"advice", &q.Advice}, {"spoke", &q.Spoke}}...)
}

package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/internal/ingest/enginehttp"
	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Severity is the severity of a finding.
type Severity string

// The severities.
const (
	Error   Severity = "error"   // answers are wrong, missing or late, or will be soon
	Warning Severity = "warning" // answers are correct; hits, speed or safety are lost
)

// Finding is a fault that the operator should correct.
type Finding struct {
	Severity Severity `json:"severity"`
	Check    string   `json:"check"`
	ID       Fault    `json:"id"`
	Where    string   `json:"where"` // the server, stream, node, worker or model
	What     string   `json:"what"`
	Evidence string   `json:"evidence"`
	Remedy   string   `json:"remedy"` // contains the flag or command

	// Causes lists the consequences of the finding, which are not reported separately.
	Causes []Fault `json:"causes,omitempty"`

	rank    events.RankKey // the rank of the finding; Instance is empty without a rank
	allOf   bool           // the finding concerns all ranks of rank.Instance
	storage bool           // a node's problem with NATS or its storage

	explained bool // follows from another finding
}

func finding(severity Severity, id Fault, where, what, evidence, remedy string) Finding {
	return Finding{Severity: severity, ID: id, Where: where, What: what, Evidence: evidence, Remedy: remedy}
}

// about sets the rank of the finding, or all ranks of its worker.
func (f Finding) about(rank events.RankKey, all bool) Finding {
	f.rank, f.allOf = rank, all
	return f
}

// Result is the result of a check.
type Result struct {
	Check    string    `json:"check"`
	Looked   string    `json:"looked"`             // the examined objects
	Skipped  string    `json:"skipped,omitempty"`  // the reason for a skipped check
	Unable   bool      `json:"unable,omitempty"`   // the check failed
	NeedsOf  string    `json:"needs_of,omitempty"` // the failed check with the missing result
	Findings []Finding `json:"findings"`
}

// Report contains the results of all checks.
type Report struct {
	Namespace string   `json:"namespace"`
	Checks    []Result `json:"checks"`
}

// Findings returns the findings of a severity.
func (r *Report) Findings(s Severity) (list []Finding) {
	for _, c := range r.Checks {
		for _, f := range c.Findings {
			if f.Severity == s {
				list = append(list, f)
			}
		}
	}
	return list
}

// Failure returns an error with the number of errors and the first one; nil without errors.
func (r *Report) Failure() error {
	errs := r.Findings(Error)
	switch len(errs) {
	case 0:
		return nil
	case 1:
		return fmt.Errorf("1 error: %s: %s", errs[0].Where, errs[0].What)
	}
	return fmt.Errorf("%d errors, the first: %s: %s", len(errs), errs[0].Where, errs[0].What)
}

// Group contains findings that differ only in place and evidence.
type Group struct {
	Finding          // the first finding
	Wheres  []string // the places of all findings
}

// Where returns the first few places of a group.
func (g *Group) Where() string {
	if n := len(g.Wheres); n > groupNames {
		return fmt.Sprintf("%s and %d more", strings.Join(g.Wheres[:groupNames], ", "), n-groupNames)
	}
	return strings.Join(g.Wheres, ", ")
}

// groupNames bounds the places in the name of a group.
const groupNames = 3

// Groups combines the findings of a severity with the same fault and text. Remedies may differ in the name of the
// place.
func (r *Report) Groups(s Severity) (list []Group) {
	type kind struct {
		id           Fault
		what, remedy string
	}
	at := map[kind]int{}
	for _, f := range r.Findings(s) {
		name, _, _ := strings.Cut(f.Where, "/")
		quoted := strings.ReplaceAll(f.Remedy, escape.Operand(name), "")
		k := kind{f.ID, f.What, strings.ReplaceAll(quoted, name, "")}
		i, known := at[k]
		if !known {
			i = len(list)
			at[k], list = i, append(list, Group{Finding: f})
		}
		list[i].Wheres = append(list[i].Wheres, f.Where)
	}
	return list
}

// Unable returns the names of the failed checks.
func (r *Report) Unable() (names []string) {
	for _, c := range r.Checks {
		if c.Unable {
			names = append(names, c.Check)
		}
	}
	return names
}

// Config configures an examination.
type Config struct {
	Namespace string

	// Connect connects to NATS; [jetstream.ConnOptions.Core] is enough. Shown is the address for messages.
	Connect func(context.Context) (*jetstream.Conn, error)
	Shown   string

	OverHTTP *client.Client // for requests to nodes if NATS is unreachable; nil disables it

	Timeout time.Duration // of each request

	// EngineToken is the bearer token for engines over HTTP; it may be empty. Workers register their engines'
	// addresses, so only the engines of EngineAddresses receive the token. Rule restricts the addresses; nil permits
	// every address.
	EngineToken     string
	EngineAddresses *dial.Addresses
	Rule            *dial.Rule

	// Now is the reference clock; nil selects the system's clock.
	Now func() time.Time

	Progress func(Result) // called after each check; may be nil
}

// Facts are the input of the judgements. Facts without a successful check are zero.
type Facts struct {
	Shown     string // the address of NATS
	Namespace string

	ConnectError error
	Server       jetstream.ServerInfo
	AccountError error
	Account      jetstream.AccountInfo
	OpenError    error  // of opening the namespace
	Partitions   uint32 // of the namespace
	Streams      []jetstream.StreamState

	Clocks []Clock

	Nodes      *survey.Report
	NodesError error
	Replicas   []api.PartitionReplicas
	Workers    *api.WorkerList
	Records    []registry.Record
	Shims      []control.Shim

	Recording  *RecordingFacts // nil: no node records, or the stream cannot be read
	Engines    []EngineFacts
	Tokenizers []TokenizerFacts
}

// Clock is the guaranteed minimum difference between another clock and this host's.
type Clock struct {
	Of    string
	Ahead time.Duration // negative: behind
}

// EngineFacts contains an engine's report over HTTP and its worker's registration.
type EngineFacts struct {
	Worker    events.WorkerID
	URL       string
	Model     string // from the worker's registration
	BlockSize uint32 // from the worker's registration
	Ranks     int    // ranks with a shim
	Reported  enginehttp.Engine
	Err       error
}

// TokenizerFacts is the result of tokenizing a text.
type TokenizerFacts struct {
	Model string
	Error string // empty after a success
}

// examination is one run: the facts and the connections.
type examination struct {
	cfg    Config
	facts  Facts
	conn   *jetstream.Conn
	ns     *jetstream.Namespace
	client *client.Client
}

// errSkipped is the reason why a check has no object.
type errSkipped struct{ why string }

func (e errSkipped) Error() string { return e.why }

// check is a check. look gathers facts and returns the examined objects; judge returns the findings.
type check struct {
	name  string
	needs []string // checks whose results look uses
	look  func(context.Context, *examination) (looked string, err error)
	judge func(*Facts) []Finding
	has   func(*examination) bool // whether dependent checks can run; nil without dependent checks
	asks  bool                    // needs answers of nodes, over HTTP if NATS is unreachable
}

// checks are in the order of their dependencies.
var checks = []check{
	{"nats", nil, lookAtNATS, judgeNATS,
		func(x *examination) bool { return x.conn != nil }, false},
	{"jetstream", []string{"nats"}, lookAtJetStream, judgeJetStream,
		func(x *examination) bool { return x.conn != nil && x.facts.AccountError == nil }, false},
	{"namespace", []string{"jetstream"}, lookAtNamespace, judgeNamespace,
		func(x *examination) bool { return x.ns != nil }, false},
	{"streams", []string{"namespace"}, lookAtStreams, judgeStreams, nil, false},
	{"nodes", []string{"nats"}, lookAtNodes, judgeNodes,
		func(x *examination) bool { return x.facts.Nodes != nil }, true},
	{"clocks", []string{"nats"}, lookAtClocks, judgeClocks, nil, true},
	{"replicas", []string{"nodes"}, lookAtReplicas, judgeReplicas, nil, false},
	{"workers", []string{"nodes"}, lookAtWorkers, judgeWorkers,
		func(x *examination) bool { return x.facts.Workers != nil }, false},
	{"models", []string{"workers"}, lookAtModels, judgeModels, nil, false},
	{"shims", []string{"workers", "namespace"}, lookAtShims, judgeShims, nil, false},
	{"engines", []string{"workers"}, lookAtEngines, judgeEngines, nil, false},
	{"recording", []string{"nodes"}, lookAtRecording, judgeRecording, nil, false},
	{"store", []string{"nodes"}, lookAtStores, judgeStores, nil, false},
	{"tokenizers", []string{"nodes"}, lookAtTokenizers, judgeTokenizers, nil, false},
}

// Examine runs all checks. It ends early with ctx. The report contains the checks that did not run.
func Examine(ctx context.Context, cfg Config) *Report {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	x := &examination{cfg: cfg, facts: Facts{Shown: cfg.Shown, Namespace: cfg.Namespace}}
	defer func() {
		if x.conn != nil {
			x.conn.Close()
		}
	}()
	r := &Report{Namespace: cfg.Namespace}
	lacking := map[string]Result{} // failed checks
	for _, c := range checks {
		result := c.run(ctx, x, lacking)
		if c.has != nil && !c.has(x) {
			lacking[c.name] = result
		}
		r.Checks = append(r.Checks, result)
		if cfg.Progress != nil {
			cfg.Progress(result)
		}
	}
	r.explain()
	return r
}

// run gathers and judges, unless a needed check has failed.
func (c *check) run(ctx context.Context, x *examination, lacking map[string]Result) Result {
	result := Result{Check: c.name, Findings: []Finding{}}
	for _, name := range c.needs {
		of, is := lacking[name]
		if !is || c.asks && x.client != nil {
			continue
		}
		switch result.NeedsOf = name; {
		case of.NeedsOf != "":
			result.NeedsOf, result.Skipped = of.NeedsOf, of.Skipped
		case len(of.Findings) > 0:
			result.Skipped = of.Findings[0].What
		default:
			result.Skipped = "the needed check failed"
		}
		return result
	}
	within, cancel := context.WithTimeout(ctx, x.cfg.Timeout)
	defer cancel()
	looked, err := c.look(within, x)
	result.Looked = looked
	switch skipped, is := errors.AsType[errSkipped](err); {
	case is:
		result.Skipped = skipped.why
	case client.CodeOf(err) == api.CodeNotReady && slices.Contains(c.needs, "nodes"):
		result.NeedsOf, result.Skipped = "nodes", "no node is ready"
	case err != nil:
		result.Skipped, result.Unable = err.Error(), true
	default:
		for _, f := range c.judge(&x.facts) {
			f.Check = c.name
			result.Findings = append(result.Findings, f)
		}
	}
	return result
}

// plural returns a count with its noun.
func plural(n int, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return fmt.Sprintf("%d %ss", n, word)
}

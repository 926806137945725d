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

// Severity is how bad a finding is.
type Severity string

// The severities.
const (
	Error   Severity = "error"   // answers are wrong, missing or late, or will be soon
	Warning Severity = "warning" // answers are right; hits, speed or safety are given away
)

// Finding is something that should be mended.
type Finding struct {
	Severity Severity `json:"severity"`
	Check    string   `json:"check"`
	ID       Fault    `json:"id"`
	Where    string   `json:"where"` // the server, stream, node, worker or model
	What     string   `json:"what"`
	Evidence string   `json:"evidence"`
	Remedy   string   `json:"remedy"` // with the flag or command

	// Causes lists the findings that follow from this one and are not reported by themselves.
	Causes []Fault `json:"causes,omitempty"`

	rank    events.RankKey // that the finding is about; Instance is empty if it is about none
	allOf   bool           // it is about all ranks of rank.Instance
	storage bool           // a node's problem with NATS or its storage

	explained bool // it follows from another finding
}

func finding(severity Severity, id Fault, where, what, evidence, remedy string) Finding {
	return Finding{Severity: severity, ID: id, Where: where, What: what, Evidence: evidence, Remedy: remedy}
}

// about returns the finding as one about a rank, or about all ranks of its worker.
func (f Finding) about(rank events.RankKey, all bool) Finding {
	f.rank, f.allOf = rank, all
	return f
}

// Result is what became of a check.
type Result struct {
	Check    string    `json:"check"`
	Looked   string    `json:"looked"`             // at what
	Skipped  string    `json:"skipped,omitempty"`  // why it did not look
	Unable   bool      `json:"unable,omitempty"`   // it should have looked, and could not
	NeedsOf  string    `json:"needs_of,omitempty"` // the check without whose result it could not look
	Findings []Finding `json:"findings"`
}

// Report is all of it.
type Report struct {
	Namespace string   `json:"namespace"`
	Checks    []Result `json:"checks"`
}

// Findings lists those of a severity.
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

// Group is findings that are the same but for where and the evidence.
type Group struct {
	Finding          // the first of them
	Wheres  []string // of all
}

// Where names the first few places of a group.
func (g *Group) Where() string {
	if n := len(g.Wheres); n > groupNames {
		return fmt.Sprintf("%s and %d more", strings.Join(g.Wheres[:groupNames], ", "), n-groupNames)
	}
	return strings.Join(g.Wheres, ", ")
}

// groupNames is how many places of a group are named.
const groupNames = 3

// Groups joins the findings of a severity that say the same of several places. What to do may differ by the place's
// name.
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

// Unable lists the checks that could not look.
func (r *Report) Unable() (names []string) {
	for _, c := range r.Checks {
		if c.Unable {
			names = append(names, c.Check)
		}
	}
	return names
}

// Config is what to examine.
type Config struct {
	Namespace string

	// Connect connects to NATS; [jetstream.ConnOptions.Core] is enough. Shown is where, for people.
	Connect func(context.Context) (*jetstream.Conn, error)
	Shown   string

	OverHTTP *client.Client // asks the nodes if NATS is not reached; nil: nobody does

	Timeout time.Duration // of each question

	// EngineToken is the bearer token that engines want over HTTP, if any. Workers registered the engines' addresses, so
	// only those of EngineAddresses get it. Rule judges the addresses; nil permits all.
	EngineToken     string
	EngineAddresses *dial.Addresses
	Rule            *dial.Rule

	// Now is the clock that is compared with others; nil: the system's.
	Now func() time.Time

	Progress func(Result) // is called after each check; may be nil
}

// Facts are what checks judge. What a check has not gathered is zero.
type Facts struct {
	Shown     string // the address of NATS
	Namespace string

	ConnectError error
	Server       jetstream.ServerInfo
	AccountError error
	Account      jetstream.AccountInfo
	OpenError    error  // of the namespace
	Partitions   uint32 // of the namespace
	Streams      []jetstream.StreamState

	Clocks []Clock

	Nodes      *survey.Report
	NodesError error
	Replicas   []api.PartitionReplicas
	Workers    *api.WorkerList
	Records    []registry.Record
	Shims      []control.Shim

	Engines    []EngineFacts
	Tokenizers []TokenizerFacts
}

// Clock is how another clock differs from this host's, for certain.
type Clock struct {
	Of    string
	Ahead time.Duration // negative: behind
}

// EngineFacts is what a worker's engine says over HTTP.
type EngineFacts struct {
	Worker    events.WorkerID
	URL       string
	Model     string // as the worker is registered
	BlockSize uint32 // likewise
	Ranks     int    // that have a shim
	Said      enginehttp.Engine
	Err       error
}

// TokenizerFacts is what came of a text.
type TokenizerFacts struct {
	Model string
	Error string // empty: tokens
}

// examination is one run: facts, and what they are gathered with.
type examination struct {
	cfg    Config
	facts  Facts
	conn   *jetstream.Conn
	ns     *jetstream.Namespace
	client *client.Client
}

// errSkipped is why a check has nothing to look at.
type errSkipped struct{ why string }

func (e errSkipped) Error() string { return e.why }

// check is one check: look gathers, and says at what it looked; judge finds.
type check struct {
	name  string
	needs []string // the checks whose results look uses
	look  func(context.Context, *examination) (looked string, err error)
	judge func(*Facts) []Finding
	has   func(*examination) bool // the checks that need this one can look; nil: none does
	asks  bool                    // it asks nodes, which answer over HTTP where NATS is not reached
}

// checks are in the order of what needs what.
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
	{"store", []string{"nodes"}, lookAtStores, judgeStores, nil, false},
	{"tokenizers", []string{"nodes"}, lookAtTokenizers, judgeTokenizers, nil, false},
}

// Names lists the checks, in order.
func Names() (names []string) {
	for _, c := range checks {
		names = append(names, c.name)
	}
	return names
}

// Examine runs all checks. It ends early with ctx, and then says which did not look.
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
	lacking := map[string]Result{} // the checks whose result others lack
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

// run looks and judges, unless the check needs the result of one that is lacking.
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
			result.Skipped = "that could not be checked"
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

// plural is a count with its word.
func plural(n int, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return fmt.Sprintf("%d %ss", n, word)
}

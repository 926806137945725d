package web

import (
	"fmt"
	"maps"
	"net/http"
	"slices"

	"github.com/kvatlas/kvatlas/internal/edge/rights"
)

// Cost is the class of a route by the work of a request.
type Cost int

// The classes.
const (
	Probe   Cost = iota + 1 // health, metrics, the page's files: served even by a full port, never traced
	Usual                   // any other request with a fast answer
	Costly                  // much work for a small request: forbidden for pages of other sites
	Lasting                 // keeps its slot for as long as the client likes: the same restriction
)

// Rule states the roles that may use a route, and the cost of a request.
type Rule struct {
	Needs rights.Roles // the token needs one of these roles
	Cost  Cost
}

// Rules of usual requests.
var (
	Reads     = Rule{rights.Read, Usual}
	Chooses   = Rule{rights.Route, Usual}
	Registers = Rule{rights.Register, Usual}
	Removes   = Rule{rights.Register | rights.Operate, Usual}
	Operates  = Rule{rights.Operate, Usual}
)

// Rules are the rules of a path, by method. The rule of GET also applies to HEAD.
type Rules map[string]Rule

// rest is the rule of unknown paths and of unsupported methods, which get an error.
var rest = Rule{rights.Any, Usual}

// Mux is an [http.ServeMux] with a rule for each route.
type Mux struct {
	serve *http.ServeMux
	rules map[string]Rules
}

// NewMux returns a Mux without routes.
func NewMux() *Mux { return &Mux{http.NewServeMux(), map[string]Rules{}} }

// Handle adds a path. It panics if a method has no complete rule: an unclassified route is a bug.
func (m *Mux) Handle(path string, rules Rules, handle http.HandlerFunc) {
	for method, rule := range rules {
		if rule.Needs == 0 || rule.Cost == 0 {
			panic(fmt.Sprintf("%s %s has no complete rule: %+v", method, path, rule))
		}
	}
	if len(rules) == 0 {
		panic(path + " has no rules")
	}
	m.rules[path] = rules
	m.serve.HandleFunc(path, handle)
}

// Otherwise sets the handler of unknown paths.
func (m *Mux) Otherwise(handle http.HandlerFunc) { m.serve.HandleFunc("/", handle) }

// ServeHTTP answers a request. It does not check rules.
func (m *Mux) ServeHTTP(w http.ResponseWriter, r *http.Request) { m.serve.ServeHTTP(w, r) }

// Rule returns the rule of a request.
func (m *Mux) Rule(r *http.Request) Rule {
	method := r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	_, path := m.serve.Handler(r)
	if rule, is := m.rules[path][method]; is {
		return rule
	}
	return rest
}

// Routes returns the rules of all paths.
func (m *Mux) Routes() map[string]Rules { return maps.Clone(m.rules) }

// Methods returns the methods of rules, sorted.
func (r Rules) Methods() []string { return slices.Sorted(maps.Keys(r)) }

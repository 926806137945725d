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
	Probe   Cost = iota + 1 // health, metrics, the page's files: answered even when the port has no room, never traced
	Usual                   // any other request whose answer is soon there
	Costly                  // much work for a small request, so a web page of another site must not ask it
	Lasting                 // holds a place for as long as the client likes: the same
)

// Rule says who may use a route, and what a request costs.
type Rule struct {
	Needs rights.Roles // the token has one of them
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

// Rules are those of a path, by method. The rule of GET is that of HEAD too.
type Rules map[string]Rule

// rest is the rule of paths that nobody serves and of methods that a path does not take: they are answered with an
// error.
var rest = Rule{rights.Any, Usual}

// Mux is an [http.ServeMux] with a rule for each route.
type Mux struct {
	serve *http.ServeMux
	rules map[string]Rules
}

// NewMux returns a Mux without routes.
func NewMux() *Mux { return &Mux{http.NewServeMux(), map[string]Rules{}} }

// Handle adds a path. It panics if a method has no complete rule: a route that is not classified is a bug.
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

// Otherwise sets the answer to requests for paths that nobody serves.
func (m *Mux) Otherwise(handle http.HandlerFunc) { m.serve.HandleFunc("/", handle) }

// ServeHTTP answers a request. It looks at no rule.
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

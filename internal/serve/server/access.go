package server

import (
	"encoding/json"
	"net/http"
	"strings"
	"sync/atomic"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// denial writes the error reply of a port.
type denial func(w http.ResponseWriter, failure *api.Error)

// denyAsAPI writes an error in the form of the API.
func denyAsAPI(w http.ResponseWriter, failure *api.Error) {
	_ = web.WriteReply(w, api.JSON, failure.Body(api.JSON), failure.Code.HTTPStatus()) // or the caller has gone
}

// denyAsDynamo writes an error in the form of Dynamo's services and of Mooncake's conductor.
func denyAsDynamo(w http.ResponseWriter, failure *api.Error) {
	text, _ := json.Marshal(map[string]string{"error": failure.Message}) // text can always be encoded
	_ = web.WriteReply(w, api.JSON, text, failure.Code.HTTPStatus())     // or the caller has gone
}

// guarded returns the handler of a port, with the access rules of the routes, the limits on concurrent requests, and
// traces.
func (s *Server) guarded(mux *web.Mux, deny denial) http.Handler {
	most := int64(s.QueryWorkers + s.QueryQueue)
	if q := s.Routing.Queue; q != nil {
		most += int64(q.Most()) // requests that wait for a worker are counted separately
	}
	p := &port{mux: mux, tokens: s.HTTPTokens, deny: deny, ended: s.endedHTTP, most: most, intake: &s.intake,
		next: s.tracedHTTP(mux)}
	return p.handler()
}

// port checks the access to an HTTP port and limits concurrent requests.
type port struct {
	mux    *web.Mux
	tokens *rights.Tokens // nil: no token is required
	deny   denial
	ended  func(op, outcome string) // called with the outcome of refused requests
	next   http.Handler             // serves permitted requests

	most    int64 // maximum number of concurrent requests
	intake  *web.Intake
	working atomic.Int64
}

// handler checks the access to a route. With tokens, the role of the token must permit the route. Requests of other
// sites' web pages are refused, based on the browser's headers. Without tokens, a Host header with a foreign name is
// refused too (DNS rebinding).
func (p *port) handler() http.Handler {
	site := http.NewCrossOriginProtection()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rule := p.mux.Rule(r)
		failure := p.tokens.Check(r.Header.Get("Authorization"), rule.Needs, "Authorization: Bearer ...")
		switch {
		case rule.Needs == rights.Anybody:
		case failure != nil:
			if failure.Code == api.CodeUnauthorized {
				w.Header().Set("WWW-Authenticate", `Bearer realm="kvatlas"`)
			}
		case p.tokens == nil && !cli.OwnHost(r.Host):
			failure = api.Errorf(api.CodeForbidden,
				"the request is for host %.100q; a port without --http-token-file answers to localhost and to addresses, "+
					"which prevents DNS rebinding by web pages", r.Host)
		default:
			if err := site.Check(unsafe(r, rule)); err != nil {
				failure = api.Errorf(api.CodeForbidden, "web pages of other sites have no access: %v", err)
			}
		}
		switch {
		case failure != nil:
			p.refuse(w, ops.Other, failure)
		case rule.Cost == web.Probe:
			p.mux.ServeHTTP(w, r)
		default:
			p.work(w, r)
		}
	})
}

func (p *port) refuse(w http.ResponseWriter, op string, failure *api.Error) {
	p.ended(op, failure.Outcome())
	p.deny(w, failure)
}

// unsafe changes the method of a costly request, because the cross-origin check permits every GET request.
func unsafe(r *http.Request, rule web.Rule) *http.Request {
	if rule.Cost == web.Costly || rule.Cost == web.Lasting {
		r = r.Clone(r.Context())
		r.Method = http.MethodPost
	}
	return r
}

// maxBodies limits the total size of concurrent request bodies over HTTP, and over gRPC, in bytes.
const maxBodies = 64 << 20

// work answers a request, if there is room.
func (p *port) work(w http.ResponseWriter, r *http.Request) {
	if failure := p.Take(); failure != nil {
		p.refuse(w, opOf(r), failure)
		return
	}
	end := p.intake.Receive(w, r, p)
	defer end()
	p.next.ServeHTTP(w, r)
}

// Take and Leave implement [web.Place].
func (p *port) Take() *api.Error {
	if p.working.Add(1) > p.most {
		p.working.Add(-1)
		return api.Errorf(api.CodeBusy, "%d requests are running over HTTP; retry later", p.most)
	}
	return nil
}

func (p *port) Leave() { p.working.Add(-1) }

// opOf is the operation of a request.
func opOf(r *http.Request) string {
	for _, route := range routes {
		prefix, _, named := strings.Cut(route.Path, "{")
		is := route.Path == r.URL.Path || named && strings.HasPrefix(r.URL.Path, prefix)
		if is && (route.Method == r.Method || route.Method == http.MethodGet && r.Method == http.MethodHead) {
			return route.op.Name
		}
	}
	return ops.Other
}

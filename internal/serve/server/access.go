package server

import (
	"encoding/json"
	"net/http"
	"strings"
	"sync/atomic"

	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// denial is how a port tells of an error.
type denial func(w http.ResponseWriter, failure *api.Error)

// denyAsAPI tells of it as the API does.
func denyAsAPI(w http.ResponseWriter, failure *api.Error) {
	_ = web.WriteReply(w, api.JSON, failure.Body(api.JSON), failure.Code.HTTPStatus()) // or the caller has gone
}

// denyAsDynamo tells of it as Dynamo's services and Mooncake's conductor do.
func denyAsDynamo(w http.ResponseWriter, failure *api.Error) {
	text, _ := json.Marshal(map[string]string{"error": failure.Message}) // text can always be encoded
	_ = web.WriteReply(w, api.JSON, text, failure.Code.HTTPStatus())     // or the caller has gone
}

// guarded returns the handler of a port: the rules of its routes, the bounds of what is under way, and traces.
func (s *Server) guarded(mux *web.Mux, deny denial) http.Handler {
	most := int64(s.QueryWorkers + s.QueryQueue)
	if q := s.Routing.Queue; q != nil {
		most += int64(q.Most()) // requests that wait for a worker are beside the others
	}
	p := &port{mux: mux, tokens: s.HTTPTokens, deny: deny, ended: s.endedHTTP, most: most, intake: &s.intake,
		next: s.tracedHTTP(mux)}
	return p.handler()
}

// port keeps an HTTP port to those who may use it, and bounds what is under way there.
type port struct {
	mux    *web.Mux
	tokens *rights.Tokens // nil: none is asked for
	deny   denial
	ended  func(op, outcome string) // is told of requests that do not pass
	next   http.Handler             // answers those that do

	most    int64 // requests that are worked on at once
	intake  *web.Intake
	working atomic.Int64
}

// handler lets only those pass who may use a route: whose token has the role, if there are tokens, and no web page of
// another site. Browsers say of themselves where a request comes from. One that has a name of its own made to lead
// here, and so seems to be of this site, is told by that name where there is no token to tell it by.
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
					"so that no web page can ask it by a name of its own", r.Host)
		default:
			if err := site.Check(unsafe(r, rule)); err != nil {
				failure = api.Errorf(api.CodeForbidden, "a web page of another site may not ask this: %v", err)
			}
		}
		switch {
		case failure != nil:
			p.refuse(w, api.OpOther, failure)
		case rule.Cost == web.Probe:
			p.mux.ServeHTTP(w, r)
		default:
			p.work(w, r)
		}
	})
}

func (p *port) refuse(w http.ResponseWriter, op string, failure *api.Error) {
	p.ended(op, api.Outcome(failure))
	p.deny(w, failure)
}

// unsafe returns a request as one that changes something, if it costs as much: GET alone would pass for one that does
// not.
func unsafe(r *http.Request, rule web.Rule) *http.Request {
	if rule.Cost == web.Costly || rule.Cost == web.Lasting {
		r = r.Clone(r.Context())
		r.Method = http.MethodPost
	}
	return r
}

// maxBodies bounds the bodies of the requests under way over HTTP, in bytes, and those over gRPC.
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

// Take and Leave make a port a [web.Place].
func (p *port) Take() *api.Error {
	if p.working.Add(1) > p.most {
		p.working.Add(-1)
		return api.Errorf(api.CodeBusy, "%d requests are under way over HTTP; ask again a little later", p.most)
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
	return api.OpOther
}

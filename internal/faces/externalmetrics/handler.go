package externalmetrics

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/pkg/api"
)

const (
	operation  = "external_metrics" // of all requests, in the counts of requests
	deadline   = 5 * time.Second    // of a request
	maxRunning = 64                 // requests of an API server for many autoscalers; further requests are refused
	retryAfter = 1                  // seconds, after a refused request
)

// metric is a metric with the number of a model.
type metric struct {
	name string
	of   func(*api.Scaling) uint64
}

// metrics are the metrics in the order of their names.
var metrics = []metric{
	{"kvatlas-queued-requests", func(s *api.Scaling) uint64 { return uint64(max(s.QueuedRequests, 0)) }},
	{"kvatlas-queued-uncached-tokens", func(s *api.Scaling) uint64 { return s.QueuedUncachedTokens }},
	{"kvatlas-waiting-uncached-tokens", func(s *api.Scaling) uint64 { return s.WaitingUncachedTokens }},
}

// Config configures a handler. All functions must be safe for concurrent use.
type Config struct {
	Models  func() ([]string, error) // the models with workers, in order
	Scaling func(context.Context, *api.ScalingRequest) (*api.Scaling, error)

	Now   func() time.Time
	Ended func(op, outcome string) // called with the outcome of every request
}

// Secure returns the TLS configuration of a port for the API server: the certificate of serving, and a client
// certificate of an authority with one of the common names.
func Secure(serving *tls.Config, authorities *x509.CertPool, names []string) *tls.Config {
	c := serving.Clone()
	c.ClientCAs, c.ClientAuth = authorities, tls.RequireAndVerifyClientCert
	c.VerifyConnection = func(state tls.ConnectionState) error {
		if name := state.PeerCertificates[0].Subject.CommonName; !slices.Contains(names, name) {
			return fmt.Errorf("the client certificate has the common name %.100q, which is none of %q", name, names)
		}
		return nil
	}
	return c
}

// front answers the requests of an API server.
type front struct {
	Config
	running chan struct{}
}

// Handler returns the handler of the API. The port must be restricted to API servers, see [Secure].
func Handler(cfg Config) http.Handler {
	f := &front{cfg, make(chan struct{}, maxRunning)}
	mux := http.NewServeMux()
	fixed := func(path string, object any) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) { f.send(w, r, object, nil) })
	}
	fixed("/apis", apiGroupList{typed{"APIGroupList", "v1"}, []apiGroup{ourGroup(typed{})}})
	fixed("/apis/"+group, ourGroup(typed{"APIGroup", "v1"}))
	fixed("/apis/"+groupVersion, ourResources())
	mux.HandleFunc("GET /apis/"+groupVersion+"/namespaces/{namespace}/{metric}",
		func(w http.ResponseWriter, r *http.Request) {
			list, failure := f.values(r)
			f.send(w, r, list, failure)
		})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			f.send(w, r, nil, web.WrongMethod(r, http.MethodGet))
			return
		}
		f.send(w, r, nil, api.Errorf(api.CodeUnknownOperation, "there is no %.200s", r.URL.Path))
	})
	return f.admitted(mux)
}

// admitted returns a handler that limits the running requests. A request needs the name of a client, which an API
// server sends with every request.
func (f *front) admitted(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if names := r.Header.Values("X-Remote-User"); len(names) != 1 || names[0] == "" {
			f.send(w, r, nil, api.Errorf(api.CodeUnauthorized, "the request has no header X-Remote-User of an API server"))
			return
		}
		select {
		case f.running <- struct{}{}:
			defer func() { <-f.running }()
			ctx, cancel := context.WithTimeout(r.Context(), deadline)
			defer cancel()
			next.ServeHTTP(w, r.WithContext(ctx))
		default:
			f.send(w, r, nil, api.Errorf(api.CodeBusy, "%d requests are running; retry later", maxRunning))
		}
	})
}

// values returns the values of a metric for the selected models.
func (f *front) values(r *http.Request) (*valueList, *api.Error) {
	name := r.PathValue("metric")
	at := slices.IndexFunc(metrics, func(m metric) bool { return m.name == name })
	if at < 0 {
		return nil, api.Errorf(api.CodeUnknownOperation, "there is no metric %.100q; /apis/%s lists the metrics", name,
			groupVersion)
	}
	selected, failure := f.selected(r.URL.RawQuery)
	if failure != nil {
		return nil, failure
	}
	list := &valueList{typed: typed{listKind, groupVersion}, Items: []value{}}
	for _, model := range selected {
		s, err := f.Scaling(r.Context(), &api.ScalingRequest{Model: model})
		if err != nil {
			return nil, api.AsError(err)
		}
		if len(s.Missing) > 0 {
			return nil, api.Errorf(api.CodeUnavailable, "the nodes %.200q have not answered, so the sum of model %.100q is "+
				"incomplete", s.Missing, model)
		}
		list.Items = append(list.Items, value{MetricName: name, MetricLabels: labels(model),
			Timestamp: f.Now().UTC().Format(time.RFC3339), Value: quantity(metrics[at].of(s))})
	}
	return list, nil
}

func labels(model string) map[string]string { return map[string]string{"model": labelOf(model)} }

// selected returns the models that the selector of a URL chooses. Two chosen models with the same label are an error,
// because a client would add up their values.
func (f *front) selected(query string) ([]string, *api.Error) {
	parameters, err := url.ParseQuery(query)
	if err != nil {
		return nil, api.Errorf(api.CodeMalformed, "the URL's parameters cannot be read: %v", err)
	}
	given := parameters["labelSelector"]
	if len(given) > 1 || parameters.Get("fieldSelector") != "" {
		return nil, api.Errorf(api.CodeMalformed, "a request may have one labelSelector and no fieldSelector")
	}
	selects, err := parseSelector(parameters.Get("labelSelector"))
	if err != nil {
		return nil, api.Errorf(api.CodeMalformed, "%v", err)
	}
	models, err := f.Models()
	if err != nil {
		return nil, api.AsError(err)
	}
	chosen, byLabel := []string{}, map[string]string{}
	for _, model := range models {
		of := labels(model)
		if !selects.matches(of) {
			continue
		}
		if other, is := byLabel[of["model"]]; is {
			return nil, api.Errorf(api.CodeConflict, "the models %.100q and %.100q have the same label %q", other, model,
				of["model"])
		}
		chosen, byLabel[of["model"]] = append(chosen, model), model
	}
	return chosen, nil
}

// reasons are the reasons of errors in Kubernetes, by status.
var reasons = map[int]string{
	http.StatusBadRequest: "BadRequest", http.StatusUnauthorized: "Unauthorized", http.StatusNotFound: "NotFound",
	http.StatusMethodNotAllowed: "MethodNotAllowed", http.StatusConflict: "Conflict",
	http.StatusTooManyRequests: "TooManyRequests", http.StatusServiceUnavailable: "ServiceUnavailable",
	http.StatusGatewayTimeout: "Timeout",
}

// send sends an object, or the status of a failure.
func (f *front) send(w http.ResponseWriter, r *http.Request, object any, failure *api.Error) {
	code := http.StatusOK
	if failure != nil {
		code = failure.Code.HTTPStatus()
		s := status{typed: typed{"Status", "v1"}, Status: "Failure", Message: failure.Message, Reason: reasons[code],
			Code: code}
		if s.Reason == "" {
			s.Reason = "InternalError"
		}
		if code == http.StatusTooManyRequests || code == http.StatusServiceUnavailable {
			s.Details = &statusDetails{RetryAfterSeconds: retryAfter}
			w.Header().Set("Retry-After", strconv.Itoa(retryAfter))
		}
		object = s
	}
	text, err := json.Marshal(object)
	if err != nil {
		panic(err) // the types have only strings and numbers
	}
	f.Ended(operation, web.Reply(w, r, "application/json", text, code, failure.Outcome()))
}

package main

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// httpSecurity is how the HTTP port is kept to those who may use it.
type httpSecurity struct {
	tokenFile, cert, key string

	token []byte
	tls   *tls.Config
}

// check reads what the flags name. A port that is not on loopback must have a token: what it answers tells of prompts,
// and it takes commands.
func (s *httpSecurity) check(listen string) error {
	var errs []error
	if (s.cert == "") != (s.key == "") {
		errs = append(errs, errors.New("--http-cert and --http-key go together"))
	} else if s.cert != "" {
		pair, err := tls.LoadX509KeyPair(s.cert, s.key)
		if err != nil {
			errs = append(errs, fmt.Errorf("--http-cert, --http-key: %w", err))
		}
		s.tls = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	}
	if s.tokenFile != "" {
		text, err := os.ReadFile(s.tokenFile)
		s.token = bytes.TrimSpace(text)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("--http-token-file: %w", err))
		case len(s.token) < 16:
			errs = append(errs, fmt.Errorf("--http-token-file %s: a token of %d bytes is too short; use at least 16",
				s.tokenFile, len(s.token)))
		}
	}
	host, _, err := net.SplitHostPort(listen)
	if err == nil && s.tokenFile == "" && !loopback(host) {
		errs = append(errs,
			fmt.Errorf(
				"--http-listen %s can be reached from other hosts: give --http-token-file, or listen on 127.0.0.1",
				listen))
	}
	return errors.Join(errs...)
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// open are the paths that anybody may ask: they say nothing of anybody.
func open(path string) bool { return path == "/healthz" || path == "/readyz" }

// guard lets only those pass who may use the port: who brings the token, if there is one, and no web page of another
// site. Browsers say of themselves where a request comes from. One that has a name of its own made to lead here, and so
// seems to be of this site, is told by that name where there is no token to tell it by. ended is told of requests that
// do not pass.
func (s *httpSecurity) guard(next http.Handler, ended func(op, outcome string)) http.Handler {
	want := sha256.Sum256(s.token)
	site := http.NewCrossOriginProtection()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var failure *api.Error
		scheme, given, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		got := sha256.Sum256([]byte(given)) // of one length, so that comparing takes the same time whatever was given
		switch {
		case open(r.URL.Path):
		case s.token != nil && !(subtle.ConstantTimeCompare(got[:], want[:]) == 1 &&
			strings.EqualFold(scheme, "Bearer")):
			w.Header().Set("WWW-Authenticate", `Bearer realm="kvatlas"`)
			failure = api.Errorf(api.CodeUnauthorized, "this port wants a bearer token: Authorization: Bearer ...")
		case s.token == nil && !ownHost(r.Host):
			failure = api.Errorf(api.CodeForbidden,
				"the request is for host %.100q; a port without --http-token-file answers to localhost and to addresses, "+
					"so that no web page can ask it by a name of its own", r.Host)
		default:
			if err := site.Check(r); err != nil {
				failure = api.Errorf(api.CodeForbidden, "a web page of another site may not ask this: %v", err)
			}
		}
		if failure != nil {
			ended(api.OpOther, api.Outcome(failure))
			api.WriteError(w, failure)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// ownHost reports whether a request's Host is a name that nobody else can make lead to loopback.
func ownHost(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	name := strings.ToLower(strings.TrimSuffix(host, "."))
	return host == "" || net.ParseIP(host) != nil || name == "localhost" || strings.HasSuffix(name, ".localhost")
}

package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// httpFlags are the flags of requests to indexers over HTTP.
type httpFlags struct {
	urls          []string
	tokenFile, ca string
}

func (h *httpFlags) add(f *pflag.FlagSet) {
	f.StringSliceVar(&h.urls, "http", nil, "http://HOST:PORT of an indexer, or several with commas between; asked if --nats "+
		"is not given or does not answer")
	f.StringVar(&h.tokenFile, "http-token-file", "", "file with the bearer token that the indexers of --http want")
	f.StringVar(&h.ca, "http-ca", "", "file with the authorities that vouch for the indexers of --http")
}

// client returns a client of the indexers; nil without --http.
func (h *httpFlags) client() (*client.Client, error) {
	if len(h.urls) == 0 {
		if h.tokenFile != "" || h.ca != "" {
			return nil, cli.UsageErrorf("--http-token-file and --http-ca need --http")
		}
		return nil, nil
	}
	token, err := cli.TokenFile("http-token-file", h.tokenFile)
	if err != nil {
		return nil, err
	}
	o := client.Options{Token: token}
	if h.ca != "" {
		text, err := os.ReadFile(h.ca)
		if err != nil {
			return nil, cli.UsageErrorf("--http-ca: %w", err)
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(text) {
			return nil, cli.UsageErrorf("--http-ca: %s has no certificate", h.ca)
		}
		transport := http.DefaultTransport.(*http.Transport).Clone()
		transport.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
		o.HTTP = &http.Client{Transport: transport}
	}
	c, err := client.HTTP(h.urls, o)
	if err != nil {
		return nil, cli.UsageErrorf("--http: %s", api.AsError(err).Message)
	}
	return c, nil
}

// shown returns the URLs without secrets.
func (h *httpFlags) shown() string { return jetstream.ShownAddress(strings.Join(h.urls, ",")) }

// asked is a client of the indexers with its NATS connection; the connection is nil over HTTP.
type asked struct {
	*client.Client
	conn *jetstream.Conn
}

func (o *asked) Close() {
	o.Client.Close()
	if o.conn != nil {
		o.conn.Close()
	}
}

// open connects to the indexers: over NATS, or over HTTP if --http is given and --nats is not, or does not answer.
func (a *asking) open(ctx context.Context) (*asked, error) {
	over, err := a.http.client()
	if err != nil {
		return nil, err
	}
	connecting := ctx
	if over != nil {
		if !a.flags.Changed("nats") {
			return a.overHTTP(ctx, over)
		}
		half, cancel := context.WithTimeout(ctx, a.timeout/2)
		defer cancel()
		connecting = half
	}
	conn, err := a.nats.ConnectCore(connecting, "kvatlas indexer")
	switch {
	case err == nil:
		c, err := client.NATS(conn.NATS(), a.namespace, client.Options{})
		if err != nil {
			conn.Close()
			return nil, err
		}
		return &asked{c, conn}, nil
	case !errors.Is(err, jetstream.ErrUnavailable):
		return nil, err
	case over == nil:
		return nil, fmt.Errorf("%w; a running indexer answers over HTTP too: --http URL", err)
	}
	cli.Fprintf(os.Stderr, "NATS at %s does not answer; %s is asked over HTTP\n", a.nats.Shown(), a.http.shown())
	return a.overHTTP(ctx, over)
}

// overHTTP refuses indexers of another namespace than --namespace.
func (a *asking) overHTTP(ctx context.Context, c *client.Client) (*asked, error) {
	if a.flags.Changed("namespace") {
		s, err := c.Status(ctx)
		if err != nil && client.CodeOf(err) != api.CodeForbidden {
			return nil, err
		}
		if err == nil && s.Namespace != a.namespace {
			return nil, cli.UsageErrorf("--http: the indexer at %s serves namespace %q, and --namespace is %q", a.http.shown(),
				s.Namespace, a.namespace)
		}
	}
	return &asked{c, nil}, nil
}

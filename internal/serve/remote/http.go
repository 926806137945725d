package remote

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

	"github.com/kvatlas/kvatlas/internal/base/natsurl"
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
	f.StringSliceVar(&h.urls, "http", nil, "http://HOST:PORT of an indexer, or several, separated by commas; used if "+
		"--nats is not given or does not answer")
	f.StringVar(&h.tokenFile, "http-token-file", "", "file with the bearer token for the indexers of --http")
	f.StringVar(&h.ca, "http-ca", "", "file with the certificate authorities of the indexers of --http")
}

// OverHTTP returns a client of the indexers of --http; nil without --http.
func (t *Target) OverHTTP() (*client.Client, error) {
	h := &t.http
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
func (h *httpFlags) shown() string { return natsurl.Shown(strings.Join(h.urls, ",")) }

// Client is a client of the indexers with its connection to NATS.
type Client struct {
	*client.Client
	Conn *jetstream.Conn // nil over HTTP
}

// Close closes the client and the connection.
func (c *Client) Close() {
	c.Client.Close()
	if c.Conn != nil {
		c.Conn.Close()
	}
}

// Open connects to the indexers: over NATS, or over HTTP if --http is given and --nats is not, or does not answer.
func (t *Target) Open(ctx context.Context) (*Client, error) {
	over, err := t.OverHTTP()
	if err != nil {
		return nil, err
	}
	connecting := ctx
	if over != nil {
		if !t.flags.Changed("nats") {
			return t.sameNamespace(ctx, over)
		}
		half, cancel := context.WithTimeout(ctx, t.Timeout/2)
		defer cancel()
		connecting = half
	}
	conn, err := t.NATS.ConnectCore(connecting, connection)
	switch {
	case err == nil:
		c, err := client.NATS(conn.NATS(), t.Namespace, client.Options{})
		if err != nil {
			conn.Close()
			return nil, err
		}
		return &Client{c, conn}, nil
	case !errors.Is(err, jetstream.ErrUnavailable):
		return nil, err
	case over == nil:
		return nil, fmt.Errorf("%w; a running indexer answers over HTTP too: --http URL", err)
	}
	if !t.quiet {
		cli.Fprintf(os.Stderr, "NATS at %s does not answer; the request goes to %s over HTTP\n", t.NATS.Shown(),
			t.http.shown())
	}
	return t.sameNamespace(ctx, over)
}

// sameNamespace rejects an indexer over HTTP with another namespace than --namespace.
func (t *Target) sameNamespace(ctx context.Context, c *client.Client) (*Client, error) {
	if t.flags.Changed("namespace") {
		s, err := c.Status(ctx)
		if err != nil && client.CodeOf(err) != api.CodeForbidden {
			return nil, err
		}
		if err == nil && s.Namespace != t.Namespace {
			return nil, cli.UsageErrorf("--http: the indexer at %s serves namespace %q, and --namespace is %q", t.http.shown(),
				s.Namespace, t.Namespace)
		}
	}
	return &Client{c, nil}, nil
}

package kube

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// account is the folder with a pod's service account.
const account = "/var/run/secrets/kubernetes.io/serviceaccount"

// patience bounds the wait for the header of an answer.
const patience = 15 * time.Second

// maxObject bounds the bytes of one object, and of one page of a list.
const (
	maxObject = 4 << 20
	maxPage   = 128 << 20
)

// Config configures the connection to an API server. The zero value selects the API server of the process's own pod.
type Config struct {
	URL       string // https://HOST:PORT; default: the API server of the pod's cluster
	TokenFile string // read again for each request; default: the service account's token, none if URL is set
	CAFile    string // default: the service account's CA, the system's authorities if URL is set
}

// Client speaks with an API server. It is safe for concurrent use.
type Client struct {
	url       string
	tokenFile string
	http      *http.Client
}

// New returns a client. It sends nothing.
func New(cfg Config) (*Client, error) {
	inCluster := cfg.URL == ""
	if inCluster {
		host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
		if host == "" || port == "" {
			return nil, errors.New("not running in a pod: KUBERNETES_SERVICE_HOST is not set")
		}
		cfg.URL = "https://" + net.JoinHostPort(host, port)
		cfg.TokenFile = cmp.Or(cfg.TokenFile, filepath.Join(account, "token"))
		cfg.CAFile = cmp.Or(cfg.CAFile, filepath.Join(account, "ca.crt"))
	}
	u, err := url.Parse(cfg.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" {
		return nil, errors.New("the URL of the API server is not https://HOST:PORT")
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.ResponseHeaderTimeout = patience
	transport.TLSClientConfig = &tls.Config{}
	if cfg.CAFile != "" {
		text, err := os.ReadFile(cfg.CAFile)
		if err != nil {
			return nil, err
		}
		transport.TLSClientConfig.RootCAs = x509.NewCertPool()
		if !transport.TLSClientConfig.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("%s contains no certificate", cfg.CAFile)
		}
	}
	return &Client{url: strings.TrimRight(cfg.URL, "/"), tokenFile: cfg.TokenFile, http: &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}, nil
}

// OwnNamespace returns the namespace of the pod in which the process runs; "default" outside a pod.
func OwnNamespace() string {
	text, err := os.ReadFile(filepath.Join(account, "namespace"))
	if err != nil {
		return "default"
	}
	return cmp.Or(strings.TrimSpace(string(text)), "default")
}

// StatusError is an error status of the API server.
type StatusError struct {
	Code    int    // HTTP status
	Message string // the API server's message, at most 300 bytes
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("the API server answers %d %s: %s", e.Code, http.StatusText(e.Code), e.Message)
}

// is reports whether err is an answer with the code.
func is(err error, code int) bool {
	status, ok := errors.AsType[*StatusError](err)
	return ok && status.Code == code
}

// do sends a request. The caller closes the body of the answer.
func (c *Client) do(ctx context.Context, method, path string, query url.Values, body any) (*http.Response, error) {
	var text io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		text = bytes.NewReader(data)
	}
	address := c.url + path
	if len(query) > 0 {
		address += "?" + query.Encode()
	}
	r, err := http.NewRequestWithContext(ctx, method, address, text)
	if err != nil {
		return nil, err
	}
	r.Header.Set("Accept", "application/json")
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	if c.tokenFile != "" {
		token, err := os.ReadFile(c.tokenFile)
		if err != nil {
			return nil, err
		}
		r.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	}
	answer, err := c.http.Do(r)
	if err != nil {
		return nil, err
	}
	if answer.StatusCode/100 != 2 {
		defer answer.Body.Close()
		var status struct{ Message string }
		message, _ := io.ReadAll(io.LimitReader(answer.Body, 64<<10)) // an error leaves the text shorter
		if strictjson.Unmarshal(message, &status) != nil || status.Message == "" {
			status.Message = strings.TrimSpace(string(message))
		}
		return nil, &StatusError{answer.StatusCode, status.Message[:min(len(status.Message), 300)]}
	}
	return answer, nil
}

// call sends a request and decodes the answer into out. nil skips it.
func (c *Client) call(ctx context.Context, method, path string, query url.Values, body, out any) error {
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	answer, err := c.do(ctx, method, path, query, body)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(io.LimitReader(answer.Body, maxPage))
	if err != nil || out == nil {
		return err
	}
	return strictjson.Unmarshal(text, out)
}

// InferencePool contains the decoded fields of a pool of the Gateway API's inference extension.
type InferencePool struct {
	Spec struct {
		Selector struct {
			MatchLabels map[string]string `json:"matchLabels"`
		} `json:"selector"`
		TargetPorts []struct {
			Number int `json:"number"`
		} `json:"targetPorts"`
	} `json:"spec"`
}

// Pool reads an InferencePool.
func (c *Client) Pool(ctx context.Context, namespace, name string) (*InferencePool, error) {
	pool := new(InferencePool)
	return pool, c.call(ctx, http.MethodGet, "/apis/inference.networking.k8s.io/v1/namespaces/"+
		url.PathEscape(namespace)+"/inferencepools/"+url.PathEscape(name), nil, nil, pool)
}

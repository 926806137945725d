package tracing

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// Limits of requests to the collector, equal to the limits of OpenTelemetry's exporters.
const (
	defaultSendTimeout = 10 * time.Second
	slowestRetry       = 30 * time.Second
	retryFor           = time.Minute
	maxReply           = 64 << 10
)

// firstRetry is the longest pause before the first retry, unless the receiver requests a longer one.
var firstRetry = 5 * time.Second

// sender sends spans in OTLP over HTTP. It replaces otlptracehttp of OpenTelemetry, which links gRPC and its gateway:
// 2.4 MB in each program. The environment variables are the same.
type sender struct {
	url     string
	headers http.Header
	gzip    bool
	client  *http.Client
}

var _ otlptrace.Client = (*sender)(nil)

// newSender reads the variables OTEL_EXPORTER_OTLP_... and OTEL_EXPORTER_OTLP_TRACES_.... The second kind has priority
// over the first, and the given headers have priority over both.
func newSender(endpoint string, headers map[string]string) (*sender, error) {
	s := &sender{url: endpoint, headers: http.Header{}}
	s.headers.Set("Content-Type", "application/x-protobuf")
	s.headers.Set("User-Agent", "OTel-OTLP-Exporter-kvatlas/"+otlptrace.Version())
	var errs []error
	for _, prefix := range []string{"OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"} {
		errs = append(errs, readHeaders(s.headers, prefix+"HEADERS"))
	}
	for name, value := range headers {
		s.headers.Set(name, value)
	}
	switch method := environment("COMPRESSION"); method {
	case "", "none":
	case "gzip":
		s.gzip = true
	default:
		errs = append(errs, fmt.Errorf("OTEL_EXPORTER_OTLP_COMPRESSION is %.40q, not gzip or none", method))
	}
	timeout := defaultSendTimeout
	if text := environment("TIMEOUT"); text != "" {
		ms, err := strconv.ParseUint(text, 10, 31)
		if err != nil || ms == 0 {
			errs = append(errs, fmt.Errorf("OTEL_EXPORTER_OTLP_TIMEOUT is %.40q, not a number of milliseconds", text))
		}
		timeout = time.Duration(ms) * time.Millisecond
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	config, err := tlsConfig()
	transport.TLSClientConfig = config
	s.client = &http.Client{Transport: transport, Timeout: timeout}
	return s, errors.Join(append(errs, err)...)
}

// environment returns the value of a variable for traces. If it is empty, the result is the value of the variable for
// all signals.
func environment(name string) string {
	if text := strings.TrimSpace(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_" + name)); text != "" {
		return text
	}
	return strings.TrimSpace(os.Getenv("OTEL_EXPORTER_OTLP_" + name))
}

// readHeaders parses a variable of the form NAME=VALUE,NAME=VALUE, percent-encoded. Errors contain no value.
func readHeaders(into http.Header, variable string) error {
	for pair := range strings.SplitSeq(os.Getenv(variable), ",") {
		if strings.TrimSpace(pair) == "" {
			continue
		}
		name, value, ok := strings.Cut(pair, "=")
		name = strings.TrimSpace(name)
		value, err := url.PathUnescape(strings.TrimSpace(value))
		if !ok || name == "" || err != nil {
			return fmt.Errorf("%s is not NAME=VALUE,... with percent-encoded values", variable)
		}
		into.Set(name, value)
	}
	return nil
}

// tlsConfig reads the certificates named by the variables; nil without certificates.
func tlsConfig() (*tls.Config, error) {
	authorities, cert, key := environment("CERTIFICATE"), environment("CLIENT_CERTIFICATE"), environment("CLIENT_KEY")
	if authorities == "" && cert == "" && key == "" {
		return nil, nil
	}
	config := &tls.Config{}
	if authorities != "" {
		text, err := os.ReadFile(authorities)
		if err != nil {
			return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_CERTIFICATE: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_CERTIFICATE: %s contains no certificate", authorities)
		}
	}
	if cert != "" || key != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and _KEY: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// Start does nothing: the first request opens a connection.
func (s *sender) Start(context.Context) error { return nil }

// Stop closes idle connections.
func (s *sender) Stop(context.Context) error {
	s.client.CloseIdleConnections()
	return nil
}

// UploadTraces sends spans. It retries for a minute while the collector is overloaded or unreachable, or until ctx is
// done.
func (s *sender) UploadTraces(ctx context.Context, spans []*tracepb.ResourceSpans) error {
	// TracesData has the wire format of the service's ExportTraceServiceRequest. The service's package would link gRPC.
	body, err := proto.Marshal(&tracepb.TracesData{ResourceSpans: spans})
	if err != nil {
		return err
	}
	if s.gzip {
		var packed bytes.Buffer
		w := gzip.NewWriter(&packed)
		_, err := w.Write(body)
		if err := errors.Join(err, w.Close()); err != nil {
			return err
		}
		body = packed.Bytes()
	}
	end := time.Now().Add(retryFor)
	for retry := (loop.Backoff{Min: firstRetry, Max: slowestRetry}); ; {
		after, err := s.send(ctx, body)
		if err == nil || after < 0 {
			return err
		}
		wait := max(after, retry.Next())
		if time.Now().Add(wait).After(end) || !loop.Wait(ctx, wait) {
			return err
		}
	}
}

// send sends a request once. After an error, retry is the minimum pause before the next attempt. retry is negative if a
// further attempt is useless.
func (s *sender) send(ctx context.Context, body []byte) (retry time.Duration, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, bytes.NewReader(body))
	if err != nil {
		return -1, err
	}
	request.Header = s.headers.Clone()
	if s.gzip {
		request.Header.Set("Content-Encoding", "gzip")
	}
	reply, err := s.client.Do(request)
	if err != nil {
		return 0, err
	}
	defer reply.Body.Close()
	text, err := io.ReadAll(io.LimitReader(reply.Body, maxReply))
	switch status := reply.StatusCode; {
	case status/100 == 2 && err == nil:
		return -1, rejected(text, reply.Header.Get("Content-Type"))
	case status/100 == 2:
		return -1, err
	case status == http.StatusTooManyRequests, status == http.StatusBadGateway,
		status == http.StatusServiceUnavailable, status == http.StatusGatewayTimeout:
		if seconds, err := strconv.ParseUint(reply.Header.Get("Retry-After"), 10, 16); err == nil {
			retry = time.Duration(seconds) * time.Second
		}
	default:
		retry = -1
	}
	return retry, fmt.Errorf("the collector answers %s: %.200q", reply.Status, bytes.TrimSpace(text))
}

// rejected reads the partial_success of an ExportTraceServiceResponse: field 1, with rejected_spans as 1 and
// error_message as 2. It returns nil if the collector has accepted all spans.
func rejected(reply []byte, contentType string) error {
	if contentType != "application/x-protobuf" {
		return nil
	}
	partial, _ := field(reply, 1)
	message, _ := field(partial, 2)
	if _, n := field(partial, 1); n != 0 || len(message) > 0 {
		return fmt.Errorf("the collector rejected %d spans: %.200q", n, message)
	}
	return nil
}

// field returns a field of a protobuf message as bytes or as a number; zero if the field is missing or malformed.
func field(message []byte, number protowire.Number) (data []byte, n uint64) {
	for len(message) > 0 {
		num, typ, size := protowire.ConsumeTag(message)
		if size < 0 {
			return nil, 0
		}
		message = message[size:]
		if size = protowire.ConsumeFieldValue(num, typ, message); size < 0 {
			return nil, 0
		}
		if num == number && typ == protowire.BytesType {
			data, _ = protowire.ConsumeBytes(message)
		} else if num == number && typ == protowire.VarintType {
			n, _ = protowire.ConsumeVarint(message)
		}
		message = message[size:]
	}
	return data, n
}

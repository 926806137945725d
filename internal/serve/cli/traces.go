package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/edge/tracing"
)

// defaultSample is the default share of traces to send.
const defaultSample = 0.01

// Traces are the flags for the destination and the sampling of traces.
type Traces struct {
	flags                 *pflag.FlagSet
	endpoint, headersFile string
	ratio                 float64
	cfg                   tracing.Config
}

// TraceFlags adds --otlp-endpoint, --otlp-headers-file and --trace-sample.
func TraceFlags(f *pflag.FlagSet) *Traces {
	t := &Traces{flags: f}
	f.StringVar(&t.endpoint, "otlp-endpoint", "",
		"http://HOST:4318 of an OpenTelemetry collector for traces, OTLP over HTTP (also "+
			KnownNames["otlp-endpoint"]+"; empty: no traces are sent); see docs/tracing.md")
	f.StringVar(&t.headersFile, "otlp-headers-file", "",
		"file with headers for the collector, such as Authorization: Bearer ..., one per line")
	f.Float64Var(&t.ratio, "trace-sample", defaultSample,
		"share of sent traces, from 0 to 1, for traces that begin here (also OTEL_TRACES_SAMPLER); "+
			"other traces keep the caller's decision")
	return t
}

// Check reads the flags and the variables of OpenTelemetry.
func (t *Traces) Check() error {
	if t.endpoint == "" {
		var wrong Complaints
		for _, name := range []string{"otlp-headers-file", "trace-sample"} {
			wrong.When(t.flags.Changed(name), "--%s has no effect without --otlp-endpoint: give --otlp-endpoint, or omit --%s", name,
				name)
		}
		if len(wrong) > 0 {
			return errors.Join(wrong...)
		}
	}
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") || os.Getenv("OTEL_TRACES_EXPORTER") == "none" {
		t.endpoint = ""
	}
	if t.endpoint == "" {
		return nil
	}
	var errs []error
	about := func(flag string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", flag, err))
		}
	}
	var err error
	t.cfg.Endpoint, err = tracing.ParseEndpoint(t.endpoint)
	about("--otlp-endpoint", err)
	switch protocol := os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL"); protocol {
	case "", "http/protobuf":
	default:
		errs = append(errs, fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL is %.40q; traces are sent as http/protobuf: unset it, "+
			"and give the collector's port for this protocol, usually 4318", protocol))
	}
	t.cfg.Sampling = tracing.Sampling{Ratio: t.ratio}
	if !(t.ratio >= 0 && t.ratio <= 1) {
		errs = append(errs, fmt.Errorf("--trace-sample %v is not from 0 to 1", t.ratio))
	}
	if name := os.Getenv("OTEL_TRACES_SAMPLER"); name != "" && !t.flags.Changed("trace-sample") {
		t.cfg.Sampling, err = tracing.ParseSampler(name, os.Getenv("OTEL_TRACES_SAMPLER_ARG"))
		about("traces", err)
	}
	if t.headersFile != "" {
		t.cfg.Headers, err = readHeaders(t.headersFile)
		about("--otlp-headers-file", err)
	}
	return errors.Join(errs...)
}

// readHeaders reads a file with one header per line. Errors contain no content of the file.
func readHeaders(path string) (map[string]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	headers := map[string]string{}
	number := 0
	for line := range bytes.Lines(text) {
		number++
		if line = bytes.TrimSpace(line); len(line) == 0 {
			continue
		}
		name, value, ok := strings.Cut(string(line), ":")
		if value = strings.TrimSpace(value); !ok || name == "" || value == "" || strings.ContainsAny(name, " \t") {
			return nil, fmt.Errorf("%s: line %d is not NAME: VALUE", path, number)
		}
		headers[name] = value
	}
	return headers, nil
}

// untilTold is the minimum time between two log lines about a collector.
const untilTold = time.Minute

// Open returns the tracer; nil if tracing is off. end sends the waiting spans.
func (t *Traces) Open(ctx context.Context, service, instance string, log *slog.Logger) (
	tracer *tracing.Tracer, end func(), err error) {
	if t.endpoint == "" {
		return nil, func() {}, nil
	}
	cfg := t.cfg
	cfg.Service, cfg.Version, cfg.Instance = service, Version(), instance
	var told atomic.Int64 // Unix nanoseconds of the last log line
	cfg.Failed = func(err error) {
		now, last := time.Now().UnixNano(), told.Load()
		if now-last >= int64(untilTold) && told.CompareAndSwap(last, now) {
			log.Warn("cannot send traces", "error", err, "what_to_do",
				"check that the collector of --otlp-endpoint runs and accepts OTLP over HTTP; other work is not delayed")
		}
	}
	if tracer, err = tracing.New(ctx, cfg); err != nil {
		return nil, nil, err
	}
	log.Info("traces are sent", "endpoint", cfg.Endpoint, "sample", cfg.Sampling.Ratio)
	return tracer, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		_ = tracer.Close(ctx) // failures were counted and logged
	}, nil
}

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

// defaultSample is the share of traces that are sent.
const defaultSample = 0.01

// Traces are the flags that say where a program sends traces, and which.
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
		"http://HOST:4318 of an OpenTelemetry collector that takes traces, OTLP over HTTP (also "+
			KnownNames["otlp-endpoint"]+"; empty: none are sent); see docs/tracing.md")
	f.StringVar(&t.headersFile, "otlp-headers-file", "",
		"file with headers that the collector wants, such as Authorization: Bearer ..., one a line")
	f.Float64Var(&t.ratio, "trace-sample", defaultSample,
		"share of the traces that begin here that is sent, from 0 to 1 (also OTEL_TRACES_SAMPLER); of those that began elsewhere, those are that are sampled there")
	return t
}

// Check reads what the flags and the variables of OpenTelemetry say.
func (t *Traces) Check() error {
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
			"and give the collector's port for that, mostly 4318", protocol))
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

// readHeaders reads a file with a header in each line. No error shows what is in it.
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

// untilTold is the least time between two log lines about a collector.
const untilTold = time.Minute

// Open returns what sends traces; nil if they are not sent. close sends what waits still.
func (t *Traces) Open(ctx context.Context, service, instance string, log *slog.Logger) (
	tracer *tracing.Tracer, end func(), err error) {
	if t.endpoint == "" {
		return nil, func() {}, nil
	}
	cfg := t.cfg
	cfg.Service, cfg.Version, cfg.Instance = service, Version(), instance
	var told atomic.Int64 // nanoseconds
	cfg.Failed = func(err error) {
		now, last := time.Now().UnixNano(), told.Load()
		if now-last >= int64(untilTold) && told.CompareAndSwap(last, now) {
			log.Warn("traces cannot be sent", "error", err, "what_to_do",
				"see that the collector of --otlp-endpoint runs and takes OTLP over HTTP; nothing else waits for it")
		}
	}
	if tracer, err = tracing.New(ctx, cfg); err != nil {
		return nil, nil, err
	}
	log.Info("traces are sent", "endpoint", cfg.Endpoint, "sample", cfg.Sampling.Ratio)
	return tracer, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		_ = tracer.Close(ctx) // what could not be sent was counted, and told
	}, nil
}

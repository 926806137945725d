package cli

import (
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/edge/tracing"
)

// TestTraceFlags: values and errors of the flags and of OpenTelemetry's variables.
func TestTraceFlags(t *testing.T) {
	path := filepath.Join(t.TempDir(), "headers")
	if err := os.WriteFile(path, []byte("Authorization: Bearer abc:def\n\nX-Scope: a b\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	bad := filepath.Join(t.TempDir(), "bad")
	if err := os.WriteFile(bad, []byte("Authorization Bearer secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	const url = "http://127.0.0.1:4318"
	for _, c := range []struct {
		args     string
		env      map[string]string
		sampling tracing.Sampling
		wrong    string
	}{
		{"--otlp-endpoint " + url + " --otlp-headers-file " + path, nil, tracing.Sampling{Ratio: 0.01}, ""},
		{"--otlp-endpoint " + url + " --trace-sample 0.5", map[string]string{"OTEL_TRACES_SAMPLER": "always_on"},
			tracing.Sampling{Ratio: 0.5}, ""},
		{"--otlp-endpoint " + url, map[string]string{"OTEL_TRACES_SAMPLER": "traceidratio",
			"OTEL_TRACES_SAMPLER_ARG": "0.2"}, tracing.Sampling{Ratio: 0.2, IgnoreParent: true}, ""},
		{"--otlp-endpoint " + url + " --trace-sample 2", nil, tracing.Sampling{}, "--trace-sample 2"},
		{"--otlp-endpoint " + url + " --trace-sample NaN", nil, tracing.Sampling{}, "--trace-sample NaN"},
		{"--trace-sample 0.5", nil, tracing.Sampling{}, "--trace-sample has no effect without --otlp-endpoint"},
		{"--otlp-headers-file none", nil, tracing.Sampling{}, "--otlp-headers-file has no effect without"},
		{"--otlp-endpoint x:4318", nil, tracing.Sampling{}, "--otlp-endpoint"},
		{"--otlp-endpoint " + url + " --otlp-headers-file " + bad, nil, tracing.Sampling{}, "line 1"},
		{"--otlp-endpoint " + url + " --otlp-headers-file none", nil, tracing.Sampling{}, "none"},
		{"--otlp-endpoint " + url, map[string]string{"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, tracing.Sampling{}, "grpc"},
		{"--otlp-endpoint " + url, map[string]string{"OTEL_TRACES_SAMPLER": "x"}, tracing.Sampling{}, "OTEL_TRACES_SAMPLER"},
	} {
		t.Run(c.args, func(t *testing.T) {
			for name, value := range c.env {
				t.Setenv(name, value)
			}
			f := pflag.NewFlagSet("", pflag.ContinueOnError)
			traces := TraceFlags(f)
			if err := f.Parse(strings.Fields(c.args)); err != nil {
				t.Fatal(err)
			}
			err := traces.Check()
			if (err != nil) != (c.wrong != "") || err != nil && (!strings.Contains(err.Error(), c.wrong) ||
				strings.Contains(err.Error(), "secret")) {
				t.Fatalf("%v, not %q", err, c.wrong)
			}
			if err == nil && (traces.cfg.Sampling != c.sampling || traces.cfg.Endpoint != url+"/v1/traces") {
				t.Errorf("%+v", traces.cfg)
			}
			want := map[string]string{"Authorization": "Bearer abc:def", "X-Scope": "a b"}
			if strings.Contains(c.args, path) && !maps.Equal(traces.cfg.Headers, want) {
				t.Errorf("%v", traces.cfg.Headers)
			}
		})
	}
	for args, env := range map[string]string{"": "", "--otlp-endpoint " + url: "true"} {
		t.Setenv("OTEL_SDK_DISABLED", env)
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		off := TraceFlags(f)
		if err := errors.Join(f.Parse(strings.Fields(args)), off.Check()); err != nil {
			t.Fatal(err)
		}
		if tracer, end, err := off.Open(t.Context(), "s", "i", slog.Default()); err != nil || tracer.On() {
			t.Errorf("%q: %v", args, err)
		} else {
			end()
		}
	}
}

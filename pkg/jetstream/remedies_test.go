package jetstream

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
)

// TestRemedies: an error of the JetStream API has the server's text, the name of the code, and the remedy, once. The
// text of nats.go, a list of codes, is replaced.
func TestRemedies(t *testing.T) {
	alone := regexp.MustCompile(`err_code|\(\d{5}\)`)
	for code := range remedies {
		own := &apiError{500, code, "text of the server"}
		theirs := &jetstream.APIError{Code: 500, ErrorCode: jetstream.ErrorCode(code), Description: "text of the server"}
		for _, err := range []error{failed("create it", own), failed("create it", theirs),
			failed("create it", fmt.Errorf("stream x: %w", theirs)), failed("again", failed("create it", theirs))} {
			text := err.Error()
			if strings.Count(text, remedies[code]) != 1 || !strings.Contains(text, "text of the server (JetStream error ") ||
				alone.MatchString(text) {
				t.Errorf("%d: %s", code, text)
			}
		}
	}
	if err := failed("look", jetstream.ErrStreamNotFound); !errors.Is(err, jetstream.ErrStreamNotFound) ||
		!errors.Is(err, ErrNotFound) || alone.MatchString(err.Error()) {
		t.Errorf("%v", err)
	}
	const unknown = "no description (JetStream error 10001)"
	if err := failed("look", &apiError{ErrCode: 10001}); !strings.Contains(err.Error(), unknown) {
		t.Error(err)
	}
}

// TestReplicasNeedACluster: a single server refuses streams with several copies, and the error has the remedy.
func TestReplicasNeedACluster(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	_, err := JoinNamespace(w.ctx, w.c, NamespaceConfig{Name: "three", Partitions: 1, Replicas: 3})
	if err == nil || !strings.Contains(err.Error(), "--nats-replicas 1") || !strings.Contains(err.Error(), "10074") {
		t.Errorf("%v", err)
	}
}

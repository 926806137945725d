package api

import (
	"context"
	"errors"
	"fmt"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestCatalogue: docs/errors.md lists every code with its status, and no further codes.
func TestCatalogue(t *testing.T) {
	text, err := os.ReadFile("../../docs/errors.md")
	if err != nil {
		t.Fatal(err)
	}
	listed := map[Code]string{}
	for _, row := range regexp.MustCompile(
		"(?m)^\\| `([a-z_0-9]+)` \\| (\\d+) \\| .+ \\| .+ \\|$").FindAllStringSubmatch(string(text), -1) {
		listed[Code(row[1])] = row[2]
	}
	for code, status := range httpStatus {
		if listed[code] != fmt.Sprint(status) {
			t.Errorf("%s has the status %d, on the page %q", code, status, listed[code])
		}
		delete(listed, code)
	}
	if len(listed) > 0 {
		t.Errorf("the page has %v too", listed)
	}
	for _, limit := range []string{"900,000", "8 MiB", fmt.Sprintf("%d,%03d,%03d", MaxTokens/1000000,
		MaxTokens/1000%1000, MaxTokens%1000)} {
		if !strings.Contains(string(text), limit) {
			t.Errorf("the page does not name the limit %s", limit)
		}
	}
}

// TestOutcomeOf: a request that its caller ended is canceled, not failed.
func TestOutcomeOf(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{nil, ops.OK}, {fmt.Errorf("select: %w", context.Canceled), ops.Canceled},
		{context.DeadlineExceeded, string(CodeBehind)}, {Errorf(CodeNoWorkers, "none"), string(CodeNoWorkers)},
		{errors.New("odd"), string(CodeInternal)},
	} {
		if got := OutcomeOf(c.err); got != c.want {
			t.Errorf("%v: %s, want %s", c.err, got, c.want)
		}
	}
}

package server

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/pkg/api"
)

func TestProblemsOfLate(t *testing.T) {
	var o outcomes
	at := time.Unix(1000, 0)
	problems := func() string { return strings.Join(o.Problems(at), "; ") }
	count := func(outcome string, n int) {
		for range n {
			o.count(api.OverNATS, ops.Find, outcome, func() time.Time { return at })
		}
	}
	count(ops.OK, 3)
	count(string(api.CodeMalformed), 3) // is the caller's own trouble
	count(ops.Canceled, 3)
	if p := problems(); p != "" {
		t.Errorf("%q", p)
	}
	count(string(api.CodeBusy), 2)
	count(ops.Unsent, 1)
	if p := problems(); !strings.Contains(p, "2 requests were refused as busy") ||
		!strings.Contains(p, "1 request was unsent") {
		t.Errorf("%q", p)
	}
	at = at.Add(lately)
	count(string(api.CodeBusy), 5)
	if p := problems(); !strings.Contains(p, "7 requests were refused as busy") {
		t.Errorf("%q", p)
	}
	at = at.Add(lately)
	if p := problems(); !strings.Contains(p, "5 requests were refused as busy") || strings.Contains(p, "unsent") {
		t.Errorf("%q", p)
	}
	at = at.Add(2 * lately)
	if p := problems(); p != "" {
		t.Errorf("%q", p)
	}
	want := "[{nats find busy 7} {nats find canceled 3} {nats find malformed 3} {nats find ok 3} {nats find unsent 1}]"
	if got := fmt.Sprint(o.Counts()); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func BenchmarkCount(b *testing.B) {
	var o outcomes
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			o.Count(api.OverNATS, ops.Find, ops.OK)
		}
	})
}

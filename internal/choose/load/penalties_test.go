package load

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// TestPenaltiesEnd plays failures and successes of a worker. A penalty ends after a time, or at a success after the
// last failure. Only a failure after the end of a penalty doubles the penalty.
func TestPenaltiesEnd(t *testing.T) {
	p := NewPenalties()
	penalty := func(now time.Duration) (text string) {
		p.Read(now, func(of func(events.WorkerID) *routing.Penalty) {
			if x := of("w"); x != nil {
				text = fmt.Sprintf("%d %s %.3g", x.Failures, x.Reason, x.LeftS)
			}
		})
		return text
	}
	ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	for i, step := range []struct {
		at     int
		result api.Result
		age    uint64
		want   string
	}{
		{0, "", 0, ""},
		{100, api.ResultOK, 0, ""}, // without a failure
		{1000, api.ResultRefused, 0, "1 refused 1"},
		{1500, api.ResultTimeout, 0, "2 timeout 0.5"}, // under way at the failure
		{1999, "", 0, "2 timeout 0.001"},
		{2000, "", 0, ""}, // the penalty is over
		{2100, api.ResultStatus, 0, "3 status 2"},
		{3000, api.ResultOK, 2000, "3 status 1.1"}, // before the failure
		{3100, api.ResultOK, 0, ""},                // ended by the success
		{3200, api.ResultBroken, 0, "1 broken 1"},  // from the start
		{4300, api.ResultBroken, 100, "2 broken 1.9"},
		{7000, api.ResultBroken, 0, "3 broken 4"},
		{12_000, api.ResultBroken, 0, "4 broken 8"},
		{21_000, api.ResultBroken, 0, "5 broken 10"},
		{32_000, api.ResultBroken, 0, "6 broken 10"},
		{102_000, api.ResultOK, 90_000, ""}, // the failures have expired
		{102_100, api.ResultBroken, 0, "1 broken 1"},
	} {
		if step.result != "" {
			p.Add(ms(step.at), []api.WorkerResult{{Worker: "w", Result: step.result, AgeMS: step.age}})
		}
		if got := penalty(ms(step.at)); got != step.want {
			t.Errorf("step %d: %q, want %q", i, got, step.want)
		}
	}
	list := p.List(ms(102_200))
	if len(list) != 1 || list[0] != (api.WorkerResult{Worker: "w", Result: api.ResultBroken, AgeMS: 100}) {
		t.Errorf("listed as %+v", list)
	}
	if c := p.Counts(); c["broken"] != 7 || c["refused"] != 1 || c["timeout"] != 1 || c["status"] != 1 || len(c) != 4 {
		t.Errorf("counts %v", c)
	}
	if !p.Any() || !p.Failing("w") || p.Failing("v") {
		t.Error("only w has failed")
	}
}

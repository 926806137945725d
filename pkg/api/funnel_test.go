package api

import (
	"context"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"strings"
	"testing"
)

type funnelStub struct{ asked any }

func (f *funnelStub) Funnel(_ context.Context, r *FunnelRequest) (*Funnel, error) {
	f.asked = *r
	return &Funnel{Model: r.Model}, nil
}

func (f *funnelStub) Report(_ context.Context, r *Report) error {
	f.asked = *r
	return nil
}

func (f *funnelStub) Recorded(_ context.Context, r *RecordedRequest) (*RecordedList, error) {
	return &RecordedList{Requests: []Recorded{{Model: r.Model, ID: r.ID}}}, nil
}

func (f *funnelStub) Capacity(_ context.Context, r *CapacityRequest) (*Capacity, error) {
	return &Capacity{Model: r.Model}, nil
}

func TestFunnelRequests(t *testing.T) {
	for _, c := range []struct{ op, body, answer, failure string }{
		{ops.Funnel, `{"model":"m","since":"90s"}`, `"model":"m"`, ""},
		{ops.Funnel, `{"model":"m"}`, `"model":"m"`, ""},
		{ops.Funnel, `{}`, "", "missing_model"},
		{ops.Funnel, `{"model":"m","since":"yesterday"}`, "", `since is "yesterday", not a span of time such as 10m`},
		{ops.Funnel, `{"model":"m","since":"-1m"}`, "", "not a span of time"},
		{ops.Funnel, `{"model":"m","since":"61m"}`, "", "no more than 1h0m0s is kept"},
		{ops.Report, `{"request_id":"r","cached_tokens":0}`, `"done":true`, ""},
		{ops.Report, `{"cached_tokens":7}`, "", "request_id has 0 bytes"},
		{ops.Report, `{"request_id":"r","cached_tokens":-7}`, "", "cached_tokens"},
		{ops.Report, `{"request_id":"r","cached_tokens":4294967297}`, "", "malformed"},
		{ops.Recorded, `{"model":"m","limit":3,"id":"1-a"}`, `"id":"1-a"`, ""},
		{ops.Recorded, `{}`, "", "missing_model"},
		{ops.Recorded, `{"model":"m","limit":129}`, "", "limit is 129, more than 128"},
		{ops.Recorded, `{"model":"m","id":"1-a","before":"2-a"}`, "", "send one of them"},
		{ops.Capacity, `{"model":"m"}`, `"model":"m"`, ""},
		{ops.Capacity, `{}`, "", "missing_model"},
	} {
		reply, failure := Handler{Funnels: &funnelStub{}}.Handle(t.Context(), c.op, JSON, []byte(c.body))
		switch {
		case c.failure == "" && (failure != nil || !strings.Contains(string(reply), c.answer)):
			t.Errorf("%s %s: %s, want %s", c.op, c.body, reply, c.answer)
		case c.failure != "" && (failure == nil || !strings.Contains(failure.Error(), c.failure)):
			t.Errorf("%s %s: %v, want %s", c.op, c.body, failure, c.failure)
		}
	}
	if _, failure := (Handler{}).Handle(t.Context(), ops.Funnel, JSON, []byte(`{"model":"m"}`)); failure == nil ||
		failure.Code != CodeUnknownOperation {
		t.Errorf("without a funnel: %v", failure)
	}
}

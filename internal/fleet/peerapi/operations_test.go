package peerapi

import (
	"bytes"
	"context"
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// stub answers every request, and keeps the last one.
type stub struct{ asked any }

func (s *stub) BlockHistory(_ context.Context, q *BlockHistoryRequest) (*BlockHistory, error) {
	s.asked = q
	return &BlockHistory{Blocks: make([]BlockPast, len(q.Blocks))}, nil
}

func (s *stub) CapacitySamples(_ context.Context, q *CapacitySamplesRequest) (*CapacitySamples, error) {
	s.asked = q
	return &CapacitySamples{BlockSize: q.Most}, nil
}

func (s *stub) HotPart(_ context.Context, q *api.HotRequest) (*HotPart, error) {
	s.asked = q
	return &HotPart{BlockSize: 16}, nil
}

func (s *stub) Copied(_ context.Context, note *CopyNote) error {
	s.asked = note
	return nil
}

func (s *stub) SessionBlocks(_ context.Context, q *SessionBlocksRequest) (*SessionBlocks, error) {
	s.asked = q
	return &SessionBlocks{Missing: q.Partitions}, nil
}

func (s *stub) RemovalPart(_ context.Context, q *api.RemovalRequest) (*RemovalPart, error) {
	s.asked = q
	return &RemovalPart{Missing: q.Partitions}, nil
}

func (s *stub) TenantsPart(_ context.Context, q *TenantsPartRequest) (*TenantsPart, error) {
	s.asked = q
	return &TenantsPart{Absent: q.Partitions}, nil
}

func (s *stub) TenantCharges(context.Context) (*TenantCharges, error) {
	return &TenantCharges{Tenants: []TenantCharge{{Tenant: "t", Serial: 1, Tokens: 2}}}, nil
}

// TestRequestsArrive: a node receives each request as it was sent, in both forms. Unknown fields are ignored.
func TestRequestsArrive(t *testing.T) {
	partitions := []events.Partition{1, 7}
	for op, request := range map[string]any{
		ops.BlockHistory: &BlockHistoryRequest{Blocks: api.Hashes{1, 1<<64 - 1}, Workers: []events.WorkerID{"w"},
			Models: []string{"m"}},
		ops.CapacitySamples: &CapacitySamplesRequest{Model: "m", Most: 7},
		ops.HotPart:         &api.HotRequest{Model: "m", Limit: 3},
		ops.Copied: &CopyNote{Model: "m", Hash: "00000000000000ab", Blocks: 2, Before: 1, Worker: "w", Rank: 1,
			AtMS: 1 << 41, TookMS: 1.5, Automatic: true},
		ops.SessionBlocks: &SessionBlocksRequest{Model: "m", SessionID: "s", Partitions: partitions},
		ops.RemovalPart:   &api.RemovalRequest{Model: "m", BlockSize: 16, Partitions: partitions},
		ops.TenantsPart:   &TenantsPartRequest{Model: "m", Since: "5m", Held: true, Partitions: partitions},
	} {
		for _, form := range []string{api.JSON, api.MsgPack} {
			var s stub
			body, err := api.Marshal(form, request)
			if err != nil {
				t.Fatal(err)
			}
			if form == api.JSON {
				body = append(bytes.TrimSuffix(body, []byte("}")), `,"later":1}`...)
			}
			_, failure := api.Handler{Further: Operations(&s)}.Handle(t.Context(), op, form, body)
			if failure != nil || !reflect.DeepEqual(s.asked, request) {
				t.Errorf("%s as %s: %v, the node received %+v", op, form, failure, s.asked)
			}
		}
	}
}

// TestAnswers checks the answers to valid and invalid requests.
func TestAnswers(t *testing.T) {
	for _, c := range []struct{ op, body, answer, failure string }{
		{ops.BlockHistory, `{"blocks":[1,2]}`, `"blocks":[{`, ""},
		{ops.BlockHistory, `{"blocks":["a"]}`, "", "malformed"},
		{ops.CapacitySamples, `{"model":"m","most":7}`, `"block_size":7`, ""},
		{ops.CapacitySamples, `{"most":7}`, "", "missing_model"},
		{ops.CapacitySamples, `{"model":"m"}`, "", "most is 0; use 1 to 65536"},
		{ops.CapacitySamples, `{"model":"m","most":65537}`, "", "most is 65537; use 1 to 65536"},
		{ops.Copied, `{"model":"m","worker":"w","hash":"00000000000000ab","blocks":1}`, `"done":true`, ""},
		{ops.Copied, `{"model":"m","worker":"w","hash":"00000000000000ab","blocks":1,"before":2}`, "", "at most blocks"},
		{ops.Copied, `{"model":"m","worker":"w","hash":"x","blocks":1}`, "", "a hash has 16 hexadecimal digits"},
		{ops.HotPart, `{"model":"m"}`, `"block_size":16`, ""},
		{ops.HotPart, `{}`, "", "missing_model"},
		{ops.SessionBlocks, `{"partitions":[1]}`, "", "no session_id"},
		{ops.RemovalPart, `{"partitions":[1]}`, "", "missing_model"},
		{ops.TenantsPart, `{"since":"x"}`, "", "not a span of time"},
		{ops.TenantsPart, ``, "", "malformed"},
		{ops.TenantCharges, ``, `"tokens":2`, ""},
		{"no_operation", `{}`, "", "unknown_operation"},
	} {
		reply, failure := api.Handler{Further: Operations(&stub{})}.Handle(t.Context(), c.op, api.JSON, []byte(c.body))
		switch {
		case c.failure == "" && (failure != nil || !json.Valid(reply) || !strings.Contains(string(reply), c.answer)):
			t.Errorf("%s %s: %s, want %s", c.op, c.body, reply, c.answer)
		case c.failure != "" && (failure == nil || !strings.Contains(failure.Error(), c.failure)):
			t.Errorf("%s %s: %v, want %s", c.op, c.body, failure, c.failure)
		}
	}
}

// TestNames: no operation has the name of an operation of clients, and clients are not served the operations.
func TestNames(t *testing.T) {
	names := Names()
	if len(names) != reflect.TypeFor[Node]().NumMethod() {
		t.Errorf("%d operations: %v", len(names), names)
	}
	for _, name := range names {
		if api.OperationOf(name) != nil {
			t.Errorf("%s is an operation of clients too", name)
		}
		if _, failure := (api.Handler{}).Handle(t.Context(), name, api.JSON, []byte("{}")); failure == nil ||
			failure.Code != api.CodeUnknownOperation {
			t.Errorf("%s for a client: %v", name, failure)
		}
	}
}

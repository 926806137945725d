package api

import (
	"context"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"slices"
	"strings"
	"testing"
)

// TestOperations: each row is complete, names and routes are unique, and each operation needs its service.
func TestOperations(t *testing.T) {
	names, routes := map[string]bool{}, map[Route]string{}
	for _, o := range Operations {
		if names[o.Name] || o.Name == "" || o.Summary == "" || o.Answer == nil {
			t.Errorf("row %q is incomplete, or there twice", o.Name)
		}
		names[o.Name] = true
		if OperationOf(o.Name) != o {
			t.Errorf("%s: OperationOf returns another row", o.Name)
		}
		if !o.AnyNode && !o.OneNode && len(o.Routes) == 0 {
			t.Errorf("%s is served nowhere", o.Name)
		}
		if (len(o.Routes) > 0 || o.Granted) != (o.Access != 0) || o.Granted && !o.AnyNode {
			t.Errorf("%s: routes, access and grant do not go together", o.Name)
		}
		for _, r := range o.Routes {
			if other := routes[r]; other != "" {
				t.Errorf("%s and %s have the route %v", other, o.Name, r)
			}
			routes[r] = o.Name
			if strings.Contains(r.Path, "{instance}") != slices.Contains([]string{ops.ChangeWorker, ops.RemoveWorker}, o.Name) {
				t.Errorf("%s: only a request about a worker has the worker in its path", o.Name)
			}
		}
		if o.Name != ops.Find { // every handler has an Indexer
			_, failure := Handler{}.Handle(context.Background(), o.Name, JSON, []byte("{}"))
			if failure == nil || failure.Code != CodeUnknownOperation {
				t.Errorf("%s without a service: %v", o.Name, failure)
			}
		}
	}
	if OperationOf("no operation") != nil {
		t.Error("an unknown name has an operation")
	}
}

// TestSentOnce checks the requests that a client sends at most once.
func TestSentOnce(t *testing.T) {
	for _, c := range []struct {
		op      string
		request any
		want    bool
	}{
		{ops.Find, &Query{}, false}, {ops.Select, &SelectRequest{}, false}, {ops.Select, &SelectRequest{Book: true}, true},
		{ops.Book, &BookRequest{}, true}, {ops.OutputBlock, &RequestRef{}, true}, {ops.PrefillComplete, &RequestRef{}, false},
		{ops.Progress, &RequestRef{}, false},
		{ops.Snapshot, nil, true}, {ops.Status, nil, false}, {ops.ChangeWorker, &WorkerChange{}, false},
	} {
		if got := OperationOf(c.op).SentOnce(c.request); got != c.want {
			t.Errorf("%s %+v: sent once is %t", c.op, c.request, got)
		}
	}
}

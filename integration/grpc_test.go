package integration

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/pkg/api"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
)

// dialGRPC connects to an indexer's gRPC port, until the test ends.
func dialGRPC(t *testing.T, x *harness.Indexer) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(x.WaitFor(`gRPC is served" listen=(\S+)`)[1],
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// TestGRPC checks the health service over gRPC, and the counts of the calls in the node's status.
func TestGRPC(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "", "--grpc-listen", "127.0.0.1:0")
	health := grpc_health_v1.NewHealthClient(dialGRPC(t, x))
	answer, err := health.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	if err != nil || answer.Status != grpc_health_v1.HealthCheckResponse_SERVING {
		t.Fatal(answer, err)
	}
	want := api.RequestCount{Transport: api.OverGRPC, Operation: "Check", Outcome: ops.OK, Count: 1}
	harness.Eventually(t, "the status counts the call", func() (bool, string) {
		s := harness.Status(t, x.NATS)
		return slices.Contains(s.Requests, want), fmt.Sprint(s.Requests)
	})
	x.Stop()
}

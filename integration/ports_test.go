package integration

import (
	"crypto/x509"
	"net"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestPortTaken checks the end of a node without one of its ports. The error names the flag. Other nodes do not see the
// node.
func TestPortTaken(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", "a", "--http-listen", "").WaitFor(`msg=ready`)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	ca := harness.NewAuthority(t)
	cert, key := ca.Issue("b", x509.ExtKeyUsageServerAuth)
	for _, flag := range []string{"--http-listen", "--grpc-listen", "--select-listen", "--slot-tracker-listen",
		"--conductor-listen", "--external-metrics-listen"} {
		args := []string{"serve", "--nats", nats, "--node-id", "b", flag, taken.Addr().String()}
		if flag == "--external-metrics-listen" {
			args = append(args, "--http-cert", cert, "--http-key", key, "--external-metrics-client-ca", ca.File)
		}
		if flag != "--http-listen" {
			args = append(args, "--http-listen", "127.0.0.1:0")
		}
		if r := harness.Run(t, "indexer", args...); r.Code != 1 ||
			!strings.Contains(r.Stderr, "address already in use; choose another with "+flag) {
			t.Errorf("%s: %+v", flag, r)
		}
		if s := harness.IndexerJSON[api.ClusterStatus](t, nats, "cluster"); len(s.Nodes) != 1 || len(s.Gone) != 0 {
			t.Errorf("%s: the cluster is %+v", flag, s)
		}
	}
}

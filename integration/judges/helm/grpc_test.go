package helm

import (
	"fmt"
	"strings"
	"testing"
)

// TestGatewaysWithoutTokens: with grpc.insecure the policy admits only selected pods to the gRPC port.
func TestGatewaysWithoutTokens(t *testing.T) {
	_, all := rendered(t, renderings["gateways without tokens"])
	args := fmt.Sprint(at(all["StatefulSet kvatlas-indexer"], "spec", "template", "spec", "containers", 0, "args"))
	if !strings.Contains(args, "--grpc-insecure") || strings.Contains(args, "--grpc-client-ca") {
		t.Errorf("the indexers have %s", args)
	}
	admitted := 0
	rules, _ := at(all["NetworkPolicy kvatlas-indexer"], "spec", "ingress").([]any)
	for _, rule := range rules {
		if fmt.Sprint(at(rule, "ports", 0, "port")) != "9002" {
			continue
		}
		peers, _ := at(rule, "from").([]any)
		for _, peer := range peers {
			if admitted++; at(peer, "podSelector") == nil {
				t.Errorf("all pods of a namespace may choose workers: %v", peer)
			}
		}
	}
	if admitted != 1 {
		t.Errorf("port 9002 admits %d peers", admitted)
	}
}

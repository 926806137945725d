//go:build kube

package kube

import (
	"flag"
	"fmt"
	"os"
	"testing"
	"time"
)

// keep leaves the cluster running for a while after the tests, for a look at it.
var keep = flag.Duration("keep", 0, "how long the cluster stays after the tests")

// TestMain runs the tests on one cluster, one after the other: they measure times.
func TestMain(m *testing.M) {
	flag.Parse()
	status := 1
	begun := time.Now()
	if err := startCluster(); err != nil {
		fmt.Fprintln(os.Stderr, "kube:", err)
	} else {
		fmt.Fprintf(os.Stderr, "kube: the cluster is ready after %v\n", time.Since(begun).Round(100*time.Millisecond))
		status = m.Run()
		if *keep > 0 {
			fmt.Fprintf(os.Stderr, "kube: nsenter -t %d -m -n -p env PATH=%s KUBECONFIG=%s/pki/admin.conf bash\n",
				cluster.init, cluster.path, cluster.dir)
			time.Sleep(*keep)
		}
	}
	if err := stopCluster(); err != nil {
		fmt.Fprintln(os.Stderr, "kube: the end of the cluster:", err)
		status = 1
	}
	os.Exit(status)
}

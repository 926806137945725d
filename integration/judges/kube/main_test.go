//go:build kube

package kube

import (
	"flag"
	"fmt"
	"os"
	"testing"
	"time"
)

// keep is the time for which the cluster remains after the tests, for debugging.
var keep = flag.Duration("keep", 0, "how long the cluster stays after the tests")

// TestMain runs the tests on a single cluster in sequence, because the tests measure times.
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

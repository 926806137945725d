package integration

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// TestLameDuck: a NATS server that is told to stop by `indexer lameduck` serves indexers that stop at the same time
// until they have disconnected, and then ends by lame duck mode.
func TestLameDuck(t *testing.T) {
	t.Parallel()
	nats, monitor := loopback.Reserve(t), loopback.Reserve(t)
	_, natsPort, _ := strings.Cut(nats, ":")
	_, monitorPort, _ := strings.Cut(monitor, ":")
	server := harness.Start(t, "nats-server", "-js", "-sd", t.TempDir(), "-a", "127.0.0.1", "-p", natsPort, "-m",
		monitorPort)
	server.WaitFor(`Server is ready`)
	x := harness.Start(t, "indexer", "serve", "--nats", nats, "--http-listen", "127.0.0.1:0")
	x.WaitFor(`msg=ready`)
	pid := strconv.Itoa(server.Cmd.Process.Pid)
	if r := harness.Run(t, "indexer", "lameduck", "--pid", "999999999", "--wait", "1ms", "--monitor",
		"http://"+monitor); r.Code != 1 {
		t.Errorf("a process that is not there: %+v", r)
	}
	hook := harness.Start(t, "indexer", "lameduck", "--pid", pid, "--wait", "4m", "--monitor", "http://"+monitor)
	harness.Eventually(t, "the hook asks the server for its connections", func() (bool, string) {
		var is struct {
			Asked map[string]int `json:"http_req_stats"`
		}
		err := harness.HTTPDo(monitor, "GET", "/varz", nil, &is)
		return err == nil && is.Asked["/connz"] > 1, fmt.Sprint(is, err)
	})
	select {
	case <-hook.Done:
		t.Fatal("the hook does not wait for the indexer")
	default:
	}
	x.Stop()
	select {
	case <-hook.Done:
	case <-time.After(harness.Patience):
		t.Fatal("the hook waits although no indexer is connected")
	}
	server.WaitFor(`Entering lame duck mode`)
	<-server.Done
}

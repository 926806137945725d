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

// TestLameDuck checks that a NATS server stopped by `indexer lameduck` serves indexers that stop at the same time until
// they have disconnected, and then ends by lame duck mode.
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
		t.Errorf("a missing process: %+v", r)
	}
	hook := harness.Start(t, "indexer", "lameduck", "--pid", pid, "--wait", "4m", "--monitor", "http://"+monitor)
	harness.Eventually(t, "the hook lists the server's connections", func() (bool, string) {
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

// TestLameDuckOfCluster checks that the hook of a NATS server waits for an indexer on another server. Two stopped
// servers of three would leave the indexer without a quorum for the handover.
func TestLameDuckOfCluster(t *testing.T) {
	t.Parallel()
	const servers = 2
	var nats, monitors, routes [servers]string
	for i := range servers {
		nats[i], monitors[i], routes[i] = loopback.Reserve(t), loopback.Reserve(t), loopback.Reserve(t)
	}
	var processes [servers]*harness.Process
	for i := range servers {
		ip, port, _ := strings.Cut(nats[i], ":")
		_, monitorPort, _ := strings.Cut(monitors[i], ":")
		processes[i] = harness.Start(t, "nats-server", "-js", "-sd", t.TempDir(), "-a", ip, "-p", port, "-m", monitorPort,
			"-n", fmt.Sprint("n", i), "--cluster_name", "lame", "-cluster", "nats://"+routes[i],
			"-routes", fmt.Sprintf("nats://%s,nats://%s", routes[0], routes[1]))
	}
	for _, p := range processes {
		p.WaitFor(`Server is ready`)
	}
	x := harness.Start(t, "indexer", "serve", "--nats", nats[1], "--http-listen", "127.0.0.1:0")
	x.WaitFor(`msg=ready`)
	monitorPort := monitors[0][strings.LastIndex(monitors[0], ":"):]
	host, _, _ := strings.Cut(nats[0], ":")
	monitor := host + monitorPort
	hook := harness.Start(t, "indexer", "lameduck", "--pid", strconv.Itoa(processes[0].Cmd.Process.Pid), "--wait", "4m",
		"--monitor", "http://"+monitor)
	harness.Eventually(t, "the hook lists the server's connections", func() (bool, string) {
		select {
		case <-hook.Done:
			t.Fatal("the hook does not wait for the indexer of the other server")
		default:
		}
		var is struct {
			Asked map[string]int `json:"http_req_stats"`
		}
		err := harness.HTTPDo(monitor, "GET", "/varz", nil, &is)
		return err == nil && is.Asked["/connz"] > 1, fmt.Sprint(is, err)
	})
	x.Stop()
	select {
	case <-hook.Done:
	case <-time.After(harness.Patience):
		t.Fatal("the hook waits although no indexer is connected")
	}
	processes[0].WaitFor(`Entering lame duck mode`)
}

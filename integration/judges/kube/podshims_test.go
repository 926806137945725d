//go:build kube

package kube

import (
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

const (
	shimPods   = "app.kubernetes.io/name=kvatlas-pod-shims"
	plainPods  = "app=vllm-plain"
	eventsPort = 5557
)

// sharedPods runs two replicas of `worker-shim pods` for eight pods. A replica is deleted, and a replica is stopped
// with SIGSTOP. The other replica takes over, and the index receives new blocks of all pods.
func (w *world) sharedPods(t *testing.T, asking *network, indexer string) {
	w.privilegesOfShims(t)
	p := w.pods("-l", plainPods)[0]
	eventually(t, time.Minute, "a pod without shims does not reach the event port of an engine", func() (bool, string) {
		return !asking.open(net.JoinHostPort(p.Status.PodIP, fmt.Sprint(eventsPort))), ""
	})
	w.kubectl("scale", "deployment/vllm-plain", "--replicas=8")
	w.rolledOut("deployment/vllm-plain")
	w.registered(t, asking, indexer, plainPods, 8, 1)
	eventually(t, time.Minute, "two replicas share eight pods", func() (bool, string) {
		owns := w.owners(t)
		return len(owns) == 2 && total(owns) == 8, fmt.Sprint(owns)
	})
	w.learns(t, asking, indexer, 100_000)

	first := w.pods("-l", shimPods)[0].Metadata.Name
	begun := time.Now()
	w.kubectl("delete", "pod", first, "--wait=false")
	w.takenOver(t, first)
	t.Logf("a replica was deleted: the other has all pods after %v", time.Since(begun).Round(100*time.Millisecond))
	w.rolledOut("deployment/kvatlas-pod-shims")
	w.learns(t, asking, indexer, 200_000)

	eventually(t, time.Minute, "two replicas share eight pods again", func() (bool, string) {
		owns := w.owners(t)
		return len(owns) == 2 && total(owns) == 8, fmt.Sprint(owns)
	})
	var stopped pod
	var pid int
	eventually(t, time.Minute, "two replicas run", func() (bool, string) {
		list := w.pods("-l", shimPods)
		for _, p := range list {
			if p.Metadata.DeletionTimestamp != nil || len(p.processes(t, "worker-shim")) == 0 {
				return false, p.Metadata.Name
			}
		}
		stopped, pid = list[0], list[0].processes(t, "worker-shim")[0]
		return len(list) == 2, fmt.Sprintf("%d replicas", len(list))
	})
	begun = time.Now()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	w.takenOver(t, stopped.Metadata.Name)
	t.Logf("a replica was stopped: the other has all pods after %v", time.Since(begun).Round(100*time.Millisecond))
	w.learns(t, asking, indexer, 300_000)
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "two replicas share eight pods after SIGCONT", func() (bool, string) {
		owns := w.owners(t)
		return len(owns) == 2 && total(owns) == 8, fmt.Sprint(owns)
	})
	w.learns(t, asking, indexer, 400_000)
}

// privilegesOfShims checks that the account of the shims may only list and watch pods and write Leases in its
// namespace.
func (w *world) privilegesOfShims(t *testing.T) {
	account := "system:serviceaccount:" + w.namespace + ":kvatlas-pod-shims"
	for _, c := range []struct {
		what, namespace string
		may             bool
	}{{"list pods", w.namespace, true}, {"watch pods", w.namespace, true}, {"create leases", w.namespace, true},
		{"update leases", w.namespace, true}, {"list pods", "default", false}, {"delete pods", w.namespace, false},
		{"get secrets", w.namespace, false}, {"create pods", w.namespace, false}, {"list leases", "default", false}} {
		verb, kind, _ := strings.Cut(c.what, " ")
		out, err := inCluster("", "kube", "kubectl", "-n", c.namespace, "auth", "can-i", verb, kind, "--as", account)
		if may := err == nil; may != c.may {
			t.Errorf("%s may %s in %s: %v, not %v: %s", account, c.what, c.namespace, may, c.may, out)
		}
	}
}

// owners returns the number of connected event ports of engines, by replica of the shims.
func (w *world) owners(t *testing.T) map[string]int {
	t.Helper()
	owns := map[string]int{}
	for _, p := range w.pods("-l", shimPods) {
		ids := p.processes(t, "worker-shim")
		if len(ids) == 0 {
			continue // the pod is starting or has ended
		}
		table, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/tcp", ids[0]))
		if err != nil {
			continue
		}
		if n := len(connectedTo(string(table), eventsPort)); n > 0 {
			owns[p.Metadata.Name] = n
		}
	}
	return owns
}

// connectedTo returns the remote addresses of established connections to a port, of a table like /proc/net/tcp.
func connectedTo(table string, port uint16) map[netip.Addr]bool {
	const established = "01"
	found := map[netip.Addr]bool{}
	for _, line := range strings.Split(table, "\n")[1:] {
		fields := strings.Fields(line)
		if len(fields) < 4 || fields[3] != established {
			continue
		}
		host, at, _ := strings.Cut(fields[2], ":")
		bytes, err := hex.DecodeString(host)
		if err == nil && len(bytes) == 4 && at == fmt.Sprintf("%04X", port) {
			found[netip.AddrFrom4([4]byte{bytes[3], bytes[2], bytes[1], bytes[0]})] = true
		}
	}
	return found
}

func total(owns map[string]int) (n int) {
	for _, own := range owns {
		n += own
	}
	return n
}

// takenOver waits until the other replicas of the shims are connected to all engines.
func (w *world) takenOver(t *testing.T, from string) {
	t.Helper()
	eventually(t, time.Minute, "the others have the pods of "+from, func() (bool, string) {
		owns := w.owners(t)
		delete(owns, from)
		return total(owns) == 8, fmt.Sprint(owns)
	})
}

// learns makes every engine compute a new prompt, and waits until the index has more blocks of every engine.
func (w *world) learns(t *testing.T, from *network, indexer string, first int) {
	t.Helper()
	blocks := func() (map[string]uint64, error) {
		var list api.WorkerList
		err := w.http(from, indexer, "GET", "/v1/workers", "", &list)
		had := map[string]uint64{}
		for _, r := range list.Workers {
			had[string(r.Instance)] = uint64(r.Blocks.Device)
		}
		return had, err
	}
	had, err := blocks()
	if err != nil {
		t.Fatal(err)
	}
	pods := w.pods("-l", plainPods)
	for _, p := range pods {
		if err := w.complete(from, &p, first); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, time.Minute, "the index has the new blocks of all pods", func() (bool, string) {
		has, err := blocks()
		if err != nil {
			return false, err.Error()
		}
		for _, p := range pods {
			if name := p.Metadata.Name; has[name] <= had[name] {
				return false, fmt.Sprintf("%s has %d blocks, before %d", name, has[name], had[name])
			}
		}
		return true, ""
	})
}

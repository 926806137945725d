//go:build kube

package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/tools/child"
	"github.com/kvatlas/kvatlas/tools/pyenv"
	"golang.org/x/sys/unix"
)

const (
	root  = "../../.."
	nodes = 3 // the chart's number of NATS servers, which run on different nodes

	clusterDirs = "kvatlas-kube-*" // names of the clusters' folders
)

// mountPoints are folders of the machine on which cluster.sh mounts other folders, only for the cluster.
var mountPoints = []string{"/var/lib/kubelet", "/var/log/containers", "/run/containerd"}

// cluster is the Kubernetes of all tests.
var cluster struct {
	dir  string
	path string // PATH with the programs of the cluster
	cmd  *exec.Cmd
	out  bytes.Buffer
	done chan struct{} // closed when cmd has ended
	init int           // process id of the first process in the cluster's namespaces
	lock *os.File      // a machine has a single cluster
}

// startCluster builds images of the current programs and starts cluster.sh.
func startCluster() error {
	if os.Geteuid() != 0 {
		return errors.New("a cluster in namespaces of this machine needs root")
	}
	lock, err := os.Create(filepath.Join(os.TempDir(), "kvatlas-kube.lock"))
	if err != nil {
		return err
	}
	cluster.lock = lock // until the end of this process
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		fmt.Fprintln(os.Stderr, "kube: waiting for another cluster of the tests on this machine")
		if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
			return fmt.Errorf("lock %s: %w", lock.Name(), err)
		}
	}
	// A killed run leaves files and empty cgroups.
	if err := removeCgroups(); err != nil {
		return err
	}
	left, err := filepath.Glob(filepath.Join(os.TempDir(), clusterDirs))
	if err != nil {
		return err
	}
	for _, dir := range left {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	folders, err := pyenv.KubernetesFolders()
	if err != nil {
		return err
	}
	c := &cluster
	if c.dir, err = os.MkdirTemp("", clusterDirs); err != nil {
		return err
	}
	c.path = strings.Join(append(folders, os.Getenv("PATH")), string(filepath.ListSeparator))
	if err := writeImages(folders); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(c.dir, "log"), 0o755); err != nil {
		return err
	}
	script, err := filepath.Abs("cluster.sh")
	if err != nil {
		return err
	}
	c.cmd = exec.Command("unshare", "--mount", "--propagation", "private", "--net", "--pid", "--fork", "--kill-child",
		"--mount-proc", "bash", script, c.dir, strconv.Itoa(nodes))
	c.cmd.Env = append(os.Environ(), "PATH="+c.path, "HOME="+c.dir)
	c.cmd.Stdout, c.cmd.Stderr = &c.out, &c.out
	c.cmd.SysProcAttr = child.DiesWithUs()
	c.done = make(chan struct{})
	started := make(chan error)
	go func() {
		// The kernel ends the cluster with the starting thread, so the thread stays.
		runtime.LockOSThread()
		started <- c.cmd.Start()
		c.cmd.Wait()
		close(c.done)
		select {}
	}()
	if err := <-started; err != nil {
		return err
	}
	for begun := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		if _, err := os.Stat(filepath.Join(c.dir, "ready")); err == nil {
			break
		}
		select {
		case <-c.done:
			return fmt.Errorf("cluster.sh has ended:\n%s%s", c.out.String(), tails(filepath.Join(c.dir, "log")))
		default:
		}
		if time.Since(begun) > 5*time.Minute {
			return fmt.Errorf("the cluster is not ready after 5 minutes:\n%s", tails(filepath.Join(c.dir, "log")))
		}
	}
	if c.init, err = childOf(c.cmd.Process.Pid); err != nil {
		return err
	}
	dns, err := filepath.Abs("testdata/dns.yaml")
	if err != nil {
		return err
	}
	for _, args := range [][]string{{"apply", "-f", dns},
		{"-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=180s"}} {
		if out, err := inCluster("", "kube", append([]string{"kubectl"}, args...)...); err != nil {
			return fmt.Errorf("names of the cluster: %w\n%s", err, out)
		}
	}
	return nil
}

// stopCluster ends the cluster and removes its files. Remaining files or processes are an error.
func stopCluster() error {
	c := &cluster
	if c.dir == "" {
		return nil
	}
	if c.cmd != nil && c.cmd.Process != nil {
		c.cmd.Process.Kill()
		<-c.done
	}
	err := errors.Join(removeCgroups(), os.RemoveAll(c.dir))
	for _, dir := range mountPoints {
		os.Remove(dir) // fails if the folder is not empty
	}
	mounts, readErr := os.ReadFile("/proc/self/mountinfo")
	if strings.Contains(string(mounts), c.dir) {
		err = errors.Join(err, fmt.Errorf("mounts below %s are left:\n%s", c.dir, mounts))
	}
	return errors.Join(err, readErr)
}

// removeCgroups removes the empty cgroups of a cluster. Their processes may need a moment to end.
func removeCgroups() error {
	var all []string
	for begun := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		all = nil
		roots, err := filepath.Glob("/sys/fs/cgroup/*/kvatlas-kube")
		if err != nil {
			return err
		}
		for _, r := range roots {
			filepath.WalkDir(r, func(path string, d fs.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					all = append(all, path)
				}
				return nil
			})
		}
		for i := len(all) - 1; i >= 0; i-- {
			if os.Remove(all[i]) == nil {
				all = append(all[:i], all[i+1:]...)
			}
		}
		if len(all) == 0 {
			return nil
		}
		if time.Since(begun) > 30*time.Second {
			return fmt.Errorf("%d cgroups of an earlier cluster cannot be removed, such as %s: end its processes",
				len(all), all[0])
		}
	}
}

func writeImages(folders []string) error {
	bin, images_ := filepath.Join(cluster.dir, "bin"), filepath.Join(cluster.dir, "images")
	if err := errors.Join(os.Mkdir(bin, 0o755), os.Mkdir(images_, 0o755)); err != nil {
		return err
	}
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", bin+"/", "./cmd/...",
		"github.com/nats-io/nats-server/v2", "./integration/judges/kube/engine", "./integration/judges/kube/pause")
	cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", cmd, err, out)
	}
	for _, dir := range folders {
		coredns := filepath.Join(dir, "coredns")
		if _, err := os.Stat(coredns); err == nil {
			if err := os.Symlink(coredns, filepath.Join(bin, "coredns")); err != nil {
				return err
			}
		}
	}
	for name, i := range images(bin, engineImages) {
		if err := i.write(filepath.Join(images_, name+".tar")); err != nil {
			return err
		}
	}
	return nil
}

// tails returns the ends of the files in a folder.
func tails(dir string) string {
	var all strings.Builder
	files, _ := filepath.Glob(filepath.Join(dir, "*"))
	for _, file := range files {
		text, _ := os.ReadFile(file)
		if over := len(text) - 1500; over > 0 {
			text = text[over:]
		}
		fmt.Fprintf(&all, "=== %s\n%s\n", filepath.Base(file), text)
	}
	return all.String()
}

// childOf returns the first child of a process.
func childOf(parent int) (int, error) {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0, err
	}
	for _, file := range stats {
		text, _ := os.ReadFile(file)
		pid, rest, _ := strings.Cut(string(text), " ")
		var state byte
		var ppid int
		if _, err := fmt.Sscanf(rest[strings.LastIndexByte(rest, ')')+1:], " %c %d", &state, &ppid); err == nil &&
			ppid == parent {
			return strconv.Atoi(pid)
		}
	}
	return 0, fmt.Errorf("process %d has no child", parent)
}

// clusterCommand is a command in the namespaces of the control plane, as the administrator.
func clusterCommand(name string, args ...string) *exec.Cmd {
	cmd := exec.Command("nsenter", append([]string{"-t", strconv.Itoa(cluster.init), "-m", "-n", "-p", name}, args...)...)
	cmd.Env = append(os.Environ(), "PATH="+cluster.path, "HOME="+cluster.dir,
		"KUBECONFIG="+filepath.Join(cluster.dir, "pki/admin.conf"))
	return cmd
}

// inCluster runs a command in the cluster with the text stdin as standard input.
func inCluster(stdin, name string, args ...string) (string, error) {
	cmd := clusterCommand(name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// kubectl runs kubectl successfully.
func kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := inCluster("", "kube", append([]string{"kubectl"}, args...)...)
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// apply applies YAML. The API server must accept all objects without a warning.
func apply(t *testing.T, namespace, text string) {
	t.Helper()
	out, err := inCluster(text, "kube", "kubectl", "-n", namespace, "apply", "--validate=strict", "-f", "-")
	if err != nil || strings.Contains(out, "Warning") {
		t.Fatalf("kubectl apply: %v\n%s\n%s", err, out, text)
	}
}

// helm runs helm successfully and without a warning.
func helm(t *testing.T, args ...string) string {
	t.Helper()
	out, err := inCluster("", "helm", args...)
	if err != nil || strings.Contains(strings.ToLower(out), "warning") {
		t.Fatalf("helm %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// get reads objects.
func get[T any](t *testing.T, args ...string) (into T) {
	t.Helper()
	text := kubectl(t, append([]string{"get", "-o", "json"}, args...)...)
	if err := json.Unmarshal([]byte(text), &into); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return into
}

// pod has the used fields of a pod.
type pod struct {
	Metadata struct {
		Name              string
		UID               string
		DeletionTimestamp *time.Time
		Labels            map[string]string
	}
	Spec struct {
		NodeName string
		Volumes  []map[string]any
	}
	Status struct {
		PodIP      string
		Conditions []struct{ Type, Status string }

		ContainerStatuses, InitContainerStatuses []struct {
			Name         string
			RestartCount int
			Ready        bool
		}
	}
}

func (p *pod) ready() bool {
	for _, c := range p.Status.Conditions {
		if c.Type == "Ready" {
			return c.Status == "True" && p.Metadata.DeletionTimestamp == nil
		}
	}
	return false
}

type list[T any] struct{ Items []T }

func pods(t *testing.T, namespace string, args ...string) []pod {
	t.Helper()
	return get[list[pod]](t, append([]string{"-n", namespace, "pods"}, args...)...).Items
}

func podNamed(t *testing.T, namespace, name string) pod {
	t.Helper()
	return get[pod](t, "-n", namespace, "pod", name)
}

// processes returns the host's process ids of a pod's processes with a name.
func (p *pod) processes(t *testing.T, name string) (list []int) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		groups, _ := os.ReadFile(file)
		comm, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "comm"))
		if strings.Contains(string(groups), "/pod"+p.Metadata.UID) && strings.TrimSpace(string(comm)) == name {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, pid)
		}
	}
	return list
}

// network is the network namespace of a process.
type network struct{ pid int }

// network returns the network of a pod. Connections from the network are the pod's connections, with the pod's
// NetworkPolicies.
func (p *pod) network(t *testing.T) *network {
	t.Helper()
	list := p.processes(t, "pause")
	if len(list) == 0 {
		t.Fatalf("pod %s has no process", p.Metadata.Name)
	}
	return &network{pid: list[0]}
}

// dial connects to IP:PORT from the network.
func (n *network) dial(ctx context.Context, _, address string) (conn net.Conn, err error) {
	runtime.LockOSThread()
	own, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	defer own.Close()
	there, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", n.pid))
	if err != nil {
		return nil, err
	}
	defer there.Close()
	if err := unix.Setns(int(there.Fd()), unix.CLONE_NEWNET); err != nil {
		return nil, err
	}
	defer func() {
		if back := unix.Setns(int(own.Fd()), unix.CLONE_NEWNET); back == nil {
			runtime.UnlockOSThread() // otherwise Go ends the thread with the goroutine
		} else {
			err = errors.Join(err, back)
		}
	}()
	var d net.Dialer
	return d.DialContext(ctx, "tcp", address)
}

// client returns an HTTP client that connects from the network, with a new connection for every request.
func (n *network) client() *http.Client {
	return &http.Client{Timeout: 2 * time.Second,
		Transport: &http.Transport{DialContext: n.dial, DisableKeepAlives: true, Proxy: nil}}
}

// open reports whether a connection to IP:PORT can be made.
func (n *network) open(address string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 1500*time.Millisecond)
	defer cancel()
	conn, err := n.dial(ctx, "tcp", address)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// eventually waits until so returns true.
func eventually(t *testing.T, within time.Duration, what string, so func() (bool, string)) (took time.Duration) {
	t.Helper()
	begun := time.Now()
	for {
		ok, is := so()
		took = time.Since(begun)
		if ok {
			return took
		}
		if took > within {
			t.Fatalf("not within %v: %s; it is: %s", within, what, is)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

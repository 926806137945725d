package kube

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/tools/kubesim"
)

const podsPath = "/api/v1/namespaces/default/pods"

func pod(name, app, phase string) kubesim.Object {
	return kubesim.Object{"metadata": kubesim.Object{"name": name, "namespace": "default",
		"labels": kubesim.Object{"app": app}}, "status": kubesim.Object{"phase": phase, "podIP": "127.0.0.1"}}
}

func client(t *testing.T, s *kubesim.Server) *Client {
	t.Helper()
	c, err := New(Config{URL: s.URL})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestCopy: the copy follows the collection through pages, changes, a lost connection, an expired version and an
// unreachable API server. A new list finds deletions that no watch reported.
func TestCopy(t *testing.T) {
	s := kubesim.Start()
	defer s.Close()
	s.Page = 2
	for i := range 5 {
		s.Put(podsPath, pod(fmt.Sprintf("p%d", i), "vllm", "Running"))
	}
	s.Put(podsPath, pod("other", "web", "Running"))
	var failures atomic.Int32
	c := NewCopy[Pod](client(t, s), Pods("default", "app=vllm"), func(error) { failures.Add(1) })
	if _, err := c.List(); err != ErrNotListed {
		t.Fatalf("a copy before the first list: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.Run(ctx)
	}()
	defer func() { cancel(); <-ended }()
	names := func() (text string) {
		list, _ := c.List()
		for _, p := range list {
			if p.Runs() {
				text += p.Meta.Name + " "
			}
		}
		return text
	}
	want := func(text string) {
		t.Helper()
		testkit.Eventually(t, text, func() bool { return names() == text })
	}
	want("p0 p1 p2 p3 p4 ")
	lists := s.Lists()
	s.Put(podsPath, pod("p5", "vllm", "Pending"))
	s.Put(podsPath, pod("p5", "vllm", "Running"))
	s.Delete(podsPath, "p1")
	want("p0 p2 p3 p4 p5 ")
	gone := pod("p2", "vllm", "Running")
	gone["metadata"].(kubesim.Object)["deletionTimestamp"] = "2026-11-26T00:00:00Z"
	s.Put(podsPath, gone)
	want("p0 p3 p4 p5 ")
	s.Down(true)
	testkit.Eventually(t, "a failure", func() bool { return failures.Load() > 0 })
	s.Delete(podsPath, "p3")
	if got := names(); got != "p0 p3 p4 p5 " {
		t.Errorf("while the API server is down, the copy is %q", got)
	}
	s.Down(false)
	want("p0 p4 p5 ")
	if n := s.Lists(); n != lists {
		t.Errorf("%d lists, where a watch goes on from its version", n-lists)
	}
	s.Delete(podsPath, "p0")
	s.Compact()
	s.Put(podsPath, pod("p6", "vllm", "Running"))
	want("p4 p5 p6 ")
	if n := s.Lists(); n == lists {
		t.Error("no new list after 410 Gone")
	}
}

// TestMembership: replicas discover each other, share objects, and continue for an ended replica. A Lease without
// renewal expires on the observer's clock.
func TestMembership(t *testing.T) {
	s := kubesim.Start()
	defer s.Close()
	replica := func(name string) (m *Membership, stop func()) {
		m = NewMembership(client(t, s), "default", "shims", name, func(err error) { t.Errorf("%s: %v", name, err) })
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			m.Run(ctx)
		}()
		return m, func() { cancel(); <-ended }
	}
	a, stopA := replica("a")
	b, stopB := replica("b")
	both := []string{"a", "b"}
	now := time.Now()
	testkit.Eventually(t, "both replicas", func() bool {
		return slices.Equal(a.Members(now), both) && slices.Equal(b.Members(now), both)
	})
	counts, moved := map[string]int{}, 0
	for i := range 1000 {
		uid := fmt.Sprint("uid-", i)
		owner := Owner(both, uid)
		counts[owner]++
		if a.Owns(both, uid) == b.Owns(both, uid) {
			t.Fatalf("%s has two owners or none", uid)
		}
		if next := Owner([]string{"a", "b", "c"}, uid); next != owner && next != "c" {
			moved++
		}
	}
	if counts["a"] < 400 || counts["b"] < 400 || moved > 0 {
		t.Errorf("shares %v; %d move between remaining replicas", counts, moved)
	}
	if later := a.Members(now.Add(leaseFor)); !slices.Equal(later, []string{"a"}) && !slices.Equal(later, both) {
		t.Errorf("members %v", later) // b may have renewed meanwhile
	}
	stopB()
	testkit.Eventually(t, "the end of b", func() bool { return slices.Equal(a.Members(time.Now()), []string{"a"}) })
	stopA()
	leases := "/apis/coordination.k8s.io/v1/namespaces/default/leases"
	if left := s.Names(leases); len(left) > 0 {
		t.Errorf("Leases are left: %v", left)
	}
	s.Put(leases, kubesim.Object{"metadata": kubesim.Object{"name": "shims-dead",
		"labels": kubesim.Object{groupLabel: "shims"}}, "spec": kubesim.Object{"holderIdentity": "dead"}})
	c, stopC := replica("c")
	defer stopC()
	testkit.Eventually(t, "the dead replica", func() bool { return len(c.Members(now)) == 2 })
	if live := c.Members(now.Add(leaseFor)); slices.Contains(live, "dead") {
		t.Errorf("an expired Lease counts: %v", live)
	}
	for i := range 50 { // a replica that ends at once neither fails nor leaves its Lease
		_, stop := replica(fmt.Sprint("short", i))
		stop()
	}
	isShort := func(name string) bool { return strings.Contains(name, "short") }
	if left := s.Names(leases); slices.ContainsFunc(left, isShort) {
		t.Errorf("Leases are left: %v", left)
	}
}

// TestRefusals: a token is read anew for each request, and the message of a refusal is shown.
func TestRefusals(t *testing.T) {
	if _, err := New(Config{URL: "tcp://x"}); err == nil {
		t.Error("tcp://x is accepted")
	}
	s := kubesim.Start()
	defer s.Close()
	file := filepath.Join(t.TempDir(), "token")
	c, err := New(Config{URL: s.URL, TokenFile: file})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Pool(t.Context(), "default", "llama"); !os.IsNotExist(err) {
		t.Errorf("without the token's file: %v", err)
	}
	if err := os.WriteFile(file, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Pool(t.Context(), "default", "llama"); !is(err, 404) || !strings.Contains(err.Error(), "not found") {
		t.Errorf("a pool that is not there: %v", err)
	}
	s.Put("/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools", kubesim.Object{
		"metadata": kubesim.Object{"name": "llama"}, "spec": kubesim.Object{"selector": kubesim.Object{
			"matchLabels": kubesim.Object{"app": "llama"}}, "targetPorts": []any{kubesim.Object{"number": 8000}}}})
	pool, err := c.Pool(t.Context(), "default", "llama")
	if err != nil || pool.Spec.Selector.MatchLabels["app"] != "llama" || pool.Spec.TargetPorts[0].Number != 8000 {
		t.Errorf("the pool is %+v: %v", pool, err)
	}
}

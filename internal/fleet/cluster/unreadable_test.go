package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/logtest"
)

// TestUnreadableRecord replaces a node's record, and adds records, with values of no live process. The node rewrites
// the record, other nodes continue, and no node ends.
func TestUnreadableRecord(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), 2*testkit.Patience)
	defer cancel()
	_, _, ns, bucket := place(t, ctx)
	config := func(name, session string) MemberConfig {
		return MemberConfig{Namespace: ns, Bucket: bucket, Keeper: &shelf{}, Config: Config{Node: name, Session: session,
			Partitions: 8, Replication: 1, Heartbeat: 50 * time.Millisecond, DeadAfter: time.Second}}
	}
	live, end := context.WithCancel(ctx)
	members, done := map[string]*Member{}, make(chan error, 2)
	for _, name := range []string{"a", "b"} {
		m, err := Join(ctx, config(name, "session-"+name))
		if err != nil {
			t.Fatal(err)
		}
		members[name] = m
		go func() { done <- m.Run(live) }()
	}
	until := func(what string, ok func() bool) {
		t.Helper()
		for !ok() {
			select {
			case err := <-done:
				t.Fatalf("a member ends before: %s: %v", what, err)
			case <-time.After(10 * time.Millisecond):
			}
			if ctx.Err() != nil {
				t.Fatalf("timeout: %s", what)
			}
		}
	}
	meet := func(why string) {
		t.Helper()
		beat := members["a"].View().Self.Heartbeat
		until("b sees a, "+why, func() bool {
			peers := members["b"].View().Peers
			return len(peers) == 1 && peers[0].Node == "a" && peers[0].Session == "session-a" && peers[0].Heartbeat > beat
		})
	}
	meet("at first")
	for _, bad := range []string{"", "{", "[]", "null", `{"node":"a","ready":true,"problems":[]}`,
		`{"version":1,"node":"b","life":"copied from b"}`, `{"version":1,"node":"a","life":"","beat":1}`,
		`{"version":1,"node":"a","life":"x","ready":"0-4294967295"}`, `{"version":1,"node":"a","life":"dead","beat":7}`,
		"\x00\xff"} {
		if _, err := bucket.Put(ctx, "a", []byte(bad)); err != nil {
			t.Fatal(err)
		}
		until(fmt.Sprintf("a writes its record again after %q", bad), func() bool {
			e, err := bucket.Latest(ctx, "a")
			if err != nil {
				t.Fatal(err)
			}
			r, ok := readRecord(&e)
			return ok && r.Session == "session-a"
		})
		meet(fmt.Sprintf("after %q", bad))
	}
	// A foreign key: no node rewrites the record, all nodes report the key, and the key is not a node.
	for _, bad := range []string{"{", `{"version":1,"node":"a","life":"session-a","beat":99999,"partitions":8}`} {
		if _, err := bucket.Put(ctx, "nobody", []byte(bad)); err != nil {
			t.Fatal(err)
		}
		for _, m := range members {
			until("it is reported", func() bool { return strings.Contains(fmt.Sprint(m.View().Problems), "nobody") })
			if n := len(m.View().Peers); n != 1 {
				t.Errorf("%d peers", n)
			}
		}
		meet("beside another's")
	}
	// A second process with the name waits while the record is unreadable, and then detects the first.
	if _, err := bucket.Put(ctx, "a", []byte("{")); err != nil {
		t.Fatal(err)
	}
	if _, err := Join(ctx, config("a", "second")); !errors.Is(err, ErrNameInUse) {
		t.Errorf("a second a: %v", err)
	}
	end()
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// TestJoinOverUnreadableRecord: an unreadable record that keeps changing does not stop a node from starting.
func TestJoinOverUnreadableRecord(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	_, _, ns, bucket := place(t, ctx)
	put := func() {
		t.Helper()
		if _, err := bucket.Put(ctx, "a", []byte("{")); err != nil {
			t.Error(err)
		}
	}
	put()
	m, err := Join(ctx, MemberConfig{Namespace: ns, Bucket: bucket, Keeper: &shelf{},
		Log: logtest.New(func(l logtest.Line) {
			if strings.HasPrefix(l.Text, "there is a record of a node with this name") {
				put()
			}
		}),
		Config: Config{Node: "a", Session: "1", Partitions: 8, Replication: 1, Heartbeat: 20 * time.Millisecond,
			DeadAfter: 200 * time.Millisecond}})
	if err != nil {
		t.Fatal(err)
	}
	e, err := bucket.Latest(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	if r, ok := readRecord(&e); !ok || r.Session != "1" || m.revision != e.Revision {
		t.Errorf("the record: %s", e.Value)
	}
}

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/logtest"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestHostJoinsAtOnce starts a host of the NATS server after a crash. Records of earlier processes with the same data
// folder, under the same name and another, do not delay the node, although no time passes. The record of a live node
// does.
func TestHostJoinsAtOnce(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	_, _, ns, bucket := place(t, ctx)
	write := func(name, life string) {
		t.Helper()
		text, err := json.Marshal(Record{Version: RecordVersion, Node: name, Session: life, Heartbeat: 100,
			Partitions:  8,
			Replication: 1})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := bucket.Commit(ctx, nil, jetstream.Value{Key: name, Data: text}, 0); err != nil {
			t.Fatal(err)
		}
	}
	write("host", "folder.1")
	write("old-name", "folder.0")
	write("other", "elsewhere")
	s := &shelf{}
	m, err := Join(ctx, MemberConfig{
		Namespace: ns, Bucket: bucket, Keeper: s, Dead: func(life string) bool {
			return strings.HasPrefix(life,
				"folder.") && life != "folder.2"
		},
		Log: logtest.New(func(l logtest.Line) {
			if strings.HasPrefix(l.Text, "there is a record of a node with this name") {
				t.Error("Join waits to detect another process")
			}
		}),
		Config: Config{Node: "host", Session: "folder.2", Partitions: 8, Replication: 1, Heartbeat: time.Hour,
			DeadAfter: 10 * time.Hour, Host: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	live, end := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- m.Run(live) }()
	m.Announce(ctx) // the first heartbeat is over, and the next is an hour later
	v := m.View()
	if !v.GraceOver || len(v.Peers) != 1 || v.Peers[0].Node != "other" || s.Ready().Len() == 0 || s.Ready().Len() == 8 {
		t.Errorf("settled %v, peers %v, keeps %v", v.GraceOver, v.Peers, s.Ready())
	}
	if got := v.Self.Ready.Len(); got != s.Ready().Len() {
		t.Errorf("%d announced partitions, %d kept", got, s.Ready().Len())
	}
	end()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := bucket.Latest(ctx, "host"); !errors.Is(err, jetstream.ErrNotFound) {
		t.Errorf("the record of an ended node: %v", err)
	}
}

// TestHostAcquiresWithoutWrites has a node without any successful write, as on a full disk, and without other nodes. As
// the host of the NATS server, the node acquires everything, otherwise nothing.
func TestHostAcquiresWithoutWrites(t *testing.T) {
	t.Parallel()
	for _, host := range []bool{false, true} {
		m := New(Config{Node: "a", Session: "1", Partitions: 8, Heartbeat: time.Second, DeadAfter: 5 * time.Second,
			Host: host})
		m.Announce(Advertisement{}, false)
		if took := len(m.Step(time.Second, 0, &Look{}).Acquire); took != map[bool]int{false: 0, true: 8}[host] {
			t.Errorf("host %v: %d acquired partitions", host, took)
		}
	}
}

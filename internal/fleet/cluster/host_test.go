package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestHostJoinsAtOnce starts a node in whose process the NATS server runs, after a crash: records of processes that had
// its data folder before, under its name and under another, do not keep it, though no time passes in which they could
// be seen to stand still; that of a living node does.
func TestHostJoinsAtOnce(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
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
		Waiting: func() { t.Error("it waits to see whether somebody lives under its name") },
		Config: Config{Node: "host", Session: "folder.2", Partitions: 8, Replication: 1, Heartbeat: time.Hour,
			DeadAfter: 10 * time.Hour, Host: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	live, end := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- m.Run(live) }()
	m.Announce(ctx) // the first beat is over then, and no other comes for an hour
	v := m.View()
	if !v.GraceOver || len(v.Peers) != 1 || v.Peers[0].Node != "other" || s.Ready().Len() == 0 || s.Ready().Len() == 8 {
		t.Errorf("settled %v, peers %v, keeps %v", v.GraceOver, v.Peers, s.Ready())
	}
	if got := v.Self.Ready.Len(); got != s.Ready().Len() {
		t.Errorf("%d partitions are announced, %d are kept", got, s.Ready().Len())
	}
	end()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := bucket.Latest(ctx, "host"); !errors.Is(err, jetstream.ErrNotFound) {
		t.Errorf("the record of a node that has ended: %v", err)
	}
}

// TestHostTakesWithoutWriting has a node whose writes all fail, as when the disk is full, and which sees nobody else:
// if the NATS server runs in its process it takes everything, else nothing.
func TestHostTakesWithoutWriting(t *testing.T) {
	for _, host := range []bool{false, true} {
		m := New(Config{Node: "a", Session: "1", Partitions: 8, Heartbeat: time.Second, DeadAfter: 5 * time.Second,
			Host: host})
		m.Announce(Advertisement{}, false)
		if took := len(m.Step(time.Second, 0, &Look{}).Acquire); took != map[bool]int{false: 0, true: 8}[host] {
			t.Errorf("host %v: it took %d partitions", host, took)
		}
	}
}

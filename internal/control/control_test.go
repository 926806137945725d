package control

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// standing is a shim that stands still when it is asked for the first time, until it may go on.
type standing struct {
	now atomic.Pointer[still]
}

type still struct {
	asked atomic.Int32
	goOn  chan struct{}
}

func (s *standing) Who() Shim {
	if now := s.now.Load(); now.asked.Add(1) == 1 {
		<-now.goOn
	}
	return Shim{Instance: "w", PID: 7}
}

func (s *standing) Resync(context.Context, ResyncRequest) (Shim, error) { return s.Who(), nil }

// TestAskedTwice: a shim that stood still is not taken for gone.
func TestAskedTwice(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	server, err := jetstream.StartServer(ctx, jetstream.ServerOptions{Dir: t.TempDir(), SyncInterval: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Stop()
	conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{Server: server})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ns, err := jetstream.JoinNamespace(ctx, conn, jetstream.NamespaceConfig{Name: "test", Partitions: 1})
	if err != nil {
		t.Fatal(err)
	}
	key := events.RankKey{Instance: "w"}
	if who, err := Who(ctx, ns, key); who != nil || err != nil {
		t.Fatalf("of nobody: %v, %v", who, err)
	}
	s := &standing{}
	stop, err := Serve(ns, key, s)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	var who *Shim
	for range 10 { // the machine may stand still when it is asked for the second time
		now := &still{goOn: make(chan struct{})}
		s.now.Store(now)
		who, err = Who(ctx, ns, key)
		close(now.goOn)
		if err != nil || who != nil {
			break
		}
	}
	if err != nil || who == nil || who.PID != 7 {
		t.Errorf("of a shim that stood still: %v, %v", who, err)
	}
}

package natsserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/testkit/logtest"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// patience is the time limit of a test on a busy machine.
const patience = 4 * time.Minute

// TestSuperviseGrows starts a server on a full disk. The limit grows with the room on the disk, no connection breaks,
// and a limit of the caller stays.
func TestSuperviseGrows(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, err := Start(ctx, Options{Dir: t.TempDir(), Listen: loopback.Reserve(t), SyncInterval: time.Minute,
		MaxStore: 2 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Stop()
	conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{URLs: []string{s.URL()}, Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	other, err := nats.Connect(s.URL(), nats.NoReconnect(), nats.PingInterval(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	ns, err := jetstream.JoinNamespace(ctx, conn, jetstream.NamespaceConfig{Name: "test", Partitions: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := ns.EnsureStreams(ctx, jetstream.LogConfig{MaxBytes: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	bucket, err := ns.EnsureSnapshots(ctx, jetstream.BucketConfig{})
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; err == nil; i++ {
		if _, err = bucket.Put(ctx, fmt.Sprint(i), make([]byte, 100_000)); i > 30 {
			t.Fatal("the server stores more than the limit")
		}
	}
	if !errors.Is(err, jetstream.ErrFull) || s.Health() != nil || s.Limit() != 2<<20 {
		t.Fatalf("limit %d, healthy %v: %v", s.Limit(), s.Health(), err)
	}
	if bytes := s.grow(); bytes != 0 {
		t.Fatalf("the limit of the caller grew to %d", bytes)
	}
	s.bound = true // simulates a limit from the disk size
	supervised, stop := context.WithCancel(ctx)
	grown, lines := int64(0), []logtest.Line(nil)
	s.supervise(supervised, time.Millisecond, s.Health, logtest.New(func(l logtest.Line) {
		grown, _ = l.Attrs["bytes"].(int64)
		lines = append(lines, l)
		stop()
	}))
	if grown == 0 || grown != s.MaxStore() || s.Limit() > grown || s.Limit() < grown/2 {
		t.Fatalf("the limit grew to %d, MaxStore returns %d, Limit %d: %v", grown, s.MaxStore(), s.Limit(), lines)
	}
	if _, err := bucket.Put(ctx, "more", make([]byte, 100_000)); err != nil {
		t.Fatal(err)
	}
	if err := other.FlushTimeout(patience); err != nil {
		t.Fatalf("the connection was lost: %v", err)
	}
	addr := s.Addr()
	for err := s.Restart(ctx); err != nil; err = s.Restart(ctx) { // a child process may hold the port for a moment
		if !errors.Is(err, ErrInUse) || !loop.Wait(ctx, 10*time.Millisecond) {
			t.Fatal(err)
		}
	}
	if s.Addr() != addr {
		t.Fatalf("the server listens on %s, before the restart on %s", s.Addr(), addr)
	}
}

// TestFailedChecks: a single failed check of the server does not restart it, and two in succession do.
func TestFailedChecks(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, err := Start(ctx, Options{Dir: t.TempDir(), Listen: loopback.Reserve(t), SyncInterval: time.Minute,
		MaxStore: 2 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Stop()
	for checks, restarted := range map[string]bool{"+-+-+": false, "+--+": true} {
		before := s.current()
		supervised, stop := context.WithCancel(ctx)
		at := 0
		s.supervise(supervised, time.Millisecond, func() error {
			at++
			if at >= len(checks) {
				stop()
			}
			if at <= len(checks) && checks[at-1] == '-' {
				return errors.New("a write failed")
			}
			return nil
		}, logtest.New(func(logtest.Line) {}))
		if (s.current() != before) != restarted {
			t.Errorf("checks %s: restarted %v, want %v", checks, !restarted, restarted)
		}
	}
}

// TestExplain: only lines of a recovery get an explanation.
func TestExplain(t *testing.T) {
	if explain("Filestore [S] checkMsgs: input/output error") != nil {
		t.Error("an error of the disk has an explanation")
	}
	if explain("Filestore [S] Stream state outdated, last block has additional entries") == nil {
		t.Error("a recovery after a kill has no explanation")
	}
}

// TestHealthz: a check that a busy machine interrupted is repeated up to nine times, and no other check. A stopped
// server is unhealthy.
func TestHealthz(t *testing.T) {
	for _, c := range []struct {
		interrupted, then, want, checks int
	}{{0, 200, 200, 1}, {0, 503, 503, 1}, {9, 200, 200, 10}, {9, 503, 503, 10}, {10, 200, 500, 10}} {
		n := 0
		health := healthz(func(*server.HealthzOptions) *server.HealthStatus {
			if n++; n <= c.interrupted {
				return &server.HealthStatus{StatusCode: 500}
			}
			return &server.HealthStatus{StatusCode: c.then}
		})
		if health.StatusCode != c.want || n != c.checks {
			t.Errorf("%+v: status %d after %d checks", c, health.StatusCode, n)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, err := Start(ctx, Options{Dir: t.TempDir(), Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	s.Stop()
	if s.Health() == nil {
		t.Error("the stopped server is healthy")
	}
}

// TestStartFollowsNoLinks plants symbolic links in the data folder, as another user of the host could. The server does
// not start, and the targets of the links stay unchanged.
func TestStartFollowsNoLinks(t *testing.T) {
	for _, name := range []string{lockFile, storeFolder, filepath.Join(storeFolder, "$G", "streams")} {
		dir := t.TempDir()
		data, victim := filepath.Join(dir, "data"), filepath.Join(dir, "victim")
		if err := errors.Join(os.MkdirAll(filepath.Join(data, filepath.Dir(name)), 0o700), os.Mkdir(victim, 0o700),
			os.Symlink(victim, filepath.Join(data, name))); err != nil {
			t.Fatal(err)
		}
		if s, err := Start(t.Context(), Options{Dir: data}); err == nil {
			s.Stop()
			t.Errorf("a server runs with a link at %s", name)
		}
		if made, err := os.ReadDir(victim); err != nil || len(made) > 0 {
			t.Errorf("the server wrote %[2]v through a link at %[1]s, %[3]v", name, made, err)
		}
	}
}

// Helpers of this package's tests. Helpers that need PUB and ROUTER sockets are in package zmtp_test, because
// tools/zmtpserver imports this package.
package zmtp

import (
	"bytes"
	"context"
	"testing"
	"time"
)

// Patience bounds every wait of a test.
const Patience = 4 * time.Minute

// Internals for tests in package zmtp_test.
var (
	AppendFrame     = appendFrame
	AppendCommand   = appendCommand
	ErrTooManyConns = errTooManyConns
)

// PayloadSizes are the message sizes of the benchmarks.
var PayloadSizes = []int{200, 4 << 10, 64 << 10}

func Within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	t.Cleanup(cancel)
	return ctx
}

// Quick returns a configuration with short pauses before a reconnect.
func Quick() Config {
	return Patient(Config{BackoffMin: 5 * time.Millisecond, BackoffMax: 50 * time.Millisecond})
}

// Patient raises unset timeouts to the patience of the test.
func Patient(cfg Config) Config {
	for _, d := range []*time.Duration{&cfg.ConnectTimeout, &cfg.HandshakeTimeout, &cfg.HeartbeatTimeout} {
		if *d == 0 {
			*d = Patience
		}
	}
	return cfg
}

// Undisturbed runs a test that fails if this process stalls for seconds. After a stall it runs the test again.
func Undisturbed(t *testing.T, try func() error) {
	t.Helper()
	for deadline := time.Now().Add(Patience); ; {
		over, stood := make(chan struct{}), make(chan time.Duration, 1)
		go func() {
			longest, before := time.Duration(0), time.Now()
			for {
				select {
				case <-over:
					stood <- max(longest, time.Since(before))
					return
				case <-time.After(10 * time.Millisecond):
				}
				longest, before = max(longest, time.Since(before)), time.Now()
			}
		}()
		err := try()
		close(over)
		longest := <-stood
		if err == nil {
			return
		}
		if longest < time.Second || time.Now().After(deadline) {
			t.Fatal(err)
		}
		t.Logf("the process stood still for %v: %v", longest, err)
	}
}

func MustSub(t testing.TB, endpoint string, cfg Config, topics ...string) *Sub {
	t.Helper()
	s, err := DialSub(context.Background(), endpoint, topics, Patient(cfg))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

func MustDealer(t testing.TB, endpoint string, cfg Config) *Dealer {
	t.Helper()
	d, err := DialDealer(Within(t), endpoint, Patient(cfg))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Stop)
	return d
}

// Next waits for the next message, which must have the given kind.
func Next(t testing.TB, s *Sub, kind Kind) Message {
	t.Helper()
	m, err := s.Recv(Within(t))
	if err != nil {
		t.Fatalf("waiting for %v: %v", kind, err)
	}
	if m.Kind != kind {
		t.Fatalf("got %v %v %q, want %v", m.Kind, m.Err, m.Frames, kind)
	}
	return m
}

func Frames(parts ...string) [][]byte {
	out := make([][]byte, len(parts))
	for i, p := range parts {
		out[i] = []byte(p)
	}
	return out
}

func Equal(a, b [][]byte) bool { return bytes.Equal(Encode(a), Encode(b)) }

func Concat(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

// WaitFor polls for a condition without a notification.
func WaitFor(t testing.TB, cond func() bool) {
	t.Helper()
	ctx := Within(t)
	for !cond() {
		select {
		case <-ctx.Done():
			t.Fatal("waited in vain")
		case <-time.After(time.Millisecond):
		}
	}
}

package shim

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// clock is a presence with a simulated time.
type clock struct {
	presence
	now time.Time
}

func newClock(p presence) *clock {
	if p.silentAfter == 0 {
		p.silentAfter = 10 * time.Second
	}
	c := &clock{presence: p, now: time.Unix(1_000_000, 0)}
	c.sign = c.now
	return c
}

// pass advances the time, with refusing ports or not, and reports the time until the engine counted as gone.
func (c *clock) pass(d time.Duration, refused bool) (gone time.Duration, is bool) {
	begun, end := c.now, c.now.Add(d)
	probe := time.Time{}
	for c.now.Before(end) {
		if in, ok := c.wantsProbe(); !ok {
			probe = time.Time{}
		} else if probe.IsZero() {
			probe = c.now.Add(in)
		}
		next, isProbe := end, false
		if at, ok := c.deadline(); ok && at.Before(next) {
			next = at
		}
		if !probe.IsZero() && probe.Before(next) {
			next, isProbe = probe, true
		}
		if next.After(c.now) {
			c.now = next
		}
		went := false
		if isProbe {
			probe = time.Time{}
			went = c.probed(refused, c.now)
		} else {
			went = c.tick(c.now)
		}
		if went {
			gone, is = c.now.Sub(begun), true
		}
	}
	return gone, is
}

func (c *clock) state(t *testing.T, want api.EngineState, since time.Time) {
	t.Helper()
	if s := c.presence.state; s.Engine != want || !s.Since.Equal(since) {
		t.Fatalf("%q since %v, want %q since %v", s.Engine, s.Since, want, since)
	}
}

// TestEngineThatDied ends the connection, and all ports refuse: the engine is gone within a second, and only once.
// After a new connection the engine is connected.
func TestEngineThatDied(t *testing.T) {
	for name, err := range map[string]error{"EOF": io.EOF, "reset": errors.New("connection reset by peer"),
		"no heartbeats": zmtp.ErrSilent} {
		c := newClock(presence{})
		c.opened(c.now)
		c.now = c.now.Add(time.Minute)
		c.closed(err, c.now)
		took, gone := c.pass(time.Second, true)
		if !gone {
			t.Fatalf("%s: not gone within a second: %+v", name, c.presence.state)
		}
		c.state(t, api.EngineGone, c.now.Add(took-time.Second))
		if _, again := c.pass(time.Hour, true); again {
			t.Fatalf("%s: gone twice", name)
		}
		c.opened(c.now)
		c.state(t, api.EngineConnected, c.now)
	}
}

// TestEngineThatHangs ends connections or fails heartbeats without refusing ports, which proves nothing for any time.
// The silence starts at the last sign of life, and the engine counts as gone only with a configured time.
func TestEngineThatHangs(t *testing.T) {
	for _, goneAfter := range []time.Duration{0, 5 * time.Minute} {
		c := newClock(presence{goneAfter: goneAfter})
		c.opened(c.now)
		c.now = c.now.Add(time.Minute)
		c.received(c.now)
		last := c.now
		c.now = c.now.Add(10 * time.Second)
		c.closed(fmt.Errorf("heartbeat: %w", zmtp.ErrSilent), c.now)
		c.state(t, api.EngineSilent, last)
		took, gone := c.pass(time.Hour, false)
		if gone != (goneAfter > 0) {
			t.Fatalf("after %v: gone: %v", goneAfter, gone)
		}
		if gone {
			c.state(t, api.EngineGone, last.Add(goneAfter))
			if want := goneAfter - 10*time.Second; took != want {
				t.Fatalf("gone after %v, want %v", took, want)
			}
		} else {
			c.state(t, api.EngineSilent, last)
		}
	}
	// A cut link: the connection ends without a word, nothing refuses.
	c := newClock(presence{})
	c.opened(c.now)
	c.closed(errors.New("no route to host"), c.now)
	cut := c.now
	c.pass(9*time.Second, false)
	c.state(t, api.EngineConnected, cut)
	c.pass(time.Second, false)
	c.state(t, api.EngineSilent, cut)
	c.opened(c.now)
	c.state(t, api.EngineConnected, c.now)
}

// TestRefusalsThatProveNothing checks a refusal between other results, a proxy's refusals, and refusals during a
// connection.
func TestRefusalsThatProveNothing(t *testing.T) {
	c := newClock(presence{})
	c.opened(c.now)
	c.closed(io.EOF, c.now)
	for range 100 {
		if c.probed(true, c.now) || c.probed(false, c.now) {
			t.Fatal("gone after a single refusal")
		}
	}
	c.opened(c.now)
	for range 2 {
		if c.probed(true, c.now) {
			t.Fatal("gone while there is a connection")
		}
	}
	proxy := newClock(presence{onRefused: KeepOnRefused})
	proxy.opened(proxy.now)
	proxy.closed(io.EOF, proxy.now)
	cut := proxy.now
	if _, gone := proxy.pass(time.Hour, true); gone {
		t.Fatal("gone although a proxy may refuse")
	}
	proxy.state(t, api.EngineSilent, cut)
}

// TestReplaySocketThatIsMute checks that an engine with a formerly working replay socket is silent, and gone later,
// until its next message. A replay socket that has never replied may not be an engine's.
func TestReplaySocketThatIsMute(t *testing.T) {
	c := newClock(presence{goneAfter: 5 * time.Minute})
	c.opened(c.now)
	begun := c.now
	c.mute()
	c.state(t, api.EngineConnected, begun)
	c.now = c.now.Add(time.Second)
	c.replayed(c.now)
	last := c.now
	c.now = c.now.Add(time.Minute)
	c.mute()
	c.state(t, api.EngineSilent, last)
	c.received(c.now)
	c.state(t, api.EngineConnected, c.now)
	last = c.now
	c.mute()
	if _, gone := c.pass(5*time.Minute, false); !gone {
		t.Fatal("not gone after the silence")
	}
	c.state(t, api.EngineGone, last.Add(5*time.Minute))
	c.received(c.now) // the connection never ended
	c.state(t, api.EngineConnected, c.now)
}

// TestEngineThatNeverCame checks that a shim reports an engine that has not started yet.
func TestEngineThatNeverCame(t *testing.T) {
	c := newClock(presence{})
	begun := c.now
	if took, gone := c.pass(time.Second, true); !gone {
		t.Fatalf("not gone after %v", took)
	}
	c = newClock(presence{})
	c.pass(time.Minute, false)
	c.state(t, api.EngineSilent, begun)
}

// TestProbesAreFrequentOnlyWhileRefused checks that refusing ports are probed often. Probes of an accepting port or an
// unreachable host become rare, with pauses of a few seconds at most.
func TestProbesAreFrequentOnlyWhileRefused(t *testing.T) {
	rng := rand.New(rand.NewPCG(*seedFlag, 1))
	c := newClock(presence{})
	c.opened(c.now)
	c.closed(io.EOF, c.now)
	longest := time.Duration(0)
	for range 1000 {
		in, ok := c.wantsProbe()
		if !ok {
			t.Fatal("no probe")
		}
		if c.refusals > 0 && in > time.Second {
			t.Fatalf("a host that refuses is probed in %v", in)
		}
		longest = max(longest, in)
		c.probed(c.refusals == 0 && rng.IntN(3) == 0, c.now)
	}
	if longest > probeMost {
		t.Errorf("no probe for %v", longest)
	}
}

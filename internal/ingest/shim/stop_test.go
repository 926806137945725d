package shim

import (
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// TestStop stops shims before, with and after their engines. A shim ends after the engine is gone and the log has the
// clear. While the engine continues, the shim publishes until the end of its context.
func TestStop(t *testing.T) {
	t.Parallel()
	for _, order := range []string{"engine first", "shim first", "the engine runs on"} {
		t.Run(order, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
			defer cancel()
			engine, err := enginesim.Start(ctx, enginesim.Config{BlockSize: 4, Capacity: 100,
				Endpoint: "tcp://" + loopback.Reserve(t), Replay: "tcp://" + loopback.Reserve(t)})
			if err != nil {
				t.Fatal(err)
			}
			defer engine.Stop()
			decoder, err := events.NewDecoder(events.DecoderConfig{Engine: events.VLLM, BlockSize: 4})
			if err != nil {
				t.Fatal(err)
			}
			log, states, stop, ended := newMemory(), make(chan State, 100), make(chan struct{}), make(chan error, 1)
			running, end := context.WithCancel(ctx)
			defer end()
			go func() {
				ended <- Run(running, Config{Engine: engine.Endpoint(), Replay: engine.Replay(),
					Identity: Identity{Model: "m", BlockSize: 4}, Decoder: decoder, Log: log, SilentAfter: time.Minute,
					Stop: stop, Observer: observing{state: func(s State) { states <- s }}})
			}()
			serve := func(first uint32) {
				if _, err := engine.Serve([]uint32{first, 2, 3, 4, 5, 6, 7, 8}, nil); err != nil {
					t.Error(err)
				}
				if err := log.await(ctx, engine.State().Blocks); err != nil {
					t.Error(err)
				}
			}
			serve(1)
			switch order {
			case "engine first":
				engine.Crash()
				for s := (State{}); s.Engine != api.EngineGone; s = <-states {
				}
				select {
				case err := <-ended:
					t.Fatalf("Run ended before the stop: %v", err)
				default:
				}
				close(stop)
			case "shim first":
				close(stop)
				serve(2)
				engine.Crash()
			case "the engine runs on":
				close(stop)
				serve(3)
				end()
			}
			select {
			case err := <-ended:
				if err != nil {
					t.Error(err)
				}
			case <-ctx.Done():
				t.Fatal("Run does not end")
			}
			var want []events.BlockHash
			if order == "the engine runs on" {
				want = engine.State().Blocks
			}
			if lives := running.Err() == nil; lives != (want == nil) {
				t.Errorf("Run ended without a request: %v", lives)
			}
			now, cancelNow := context.WithCancel(ctx)
			cancelNow() // the log must have the clear already
			if err := log.await(now, want); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestEngineAcceptsNoRequests has a draining engine: its serving address refuses, and its events continue. The shim
// reports this, and the end of the refusals. An address without an earlier acceptance counts after the stop request.
func TestEngineAcceptsNoRequests(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	engine, err := enginesim.Start(ctx, enginesim.Config{BlockSize: 4, Capacity: 100})
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Stop()
	for _, everServed := range []bool{true, false} {
		decoder, err := events.NewDecoder(events.DecoderConfig{Engine: events.VLLM, BlockSize: 4})
		if err != nil {
			t.Fatal(err)
		}
		serving, unserved, stop := loopback.Reserve(t), make(chan string, 100), make(chan struct{})
		listen := func() net.Listener {
			l, err := net.Listen("tcp", serving)
			if err != nil {
				t.Fatal(err)
			}
			return l
		}
		accept := func(l net.Listener) {
			c, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			c.Close()
		}
		next := func(want string) {
			t.Helper()
			select {
			case why := <-unserved:
				if why != want {
					t.Errorf("reported %q, want %q", why, want)
				}
			case <-ctx.Done():
				t.Fatal("nothing is reported")
			}
		}
		refuses := fmt.Sprintf("its serving address %s refuses connections", serving)
		var l net.Listener
		if everServed {
			l = listen()
		}
		running, end := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() {
			ended <- Run(running, Config{Engine: engine.Endpoint(), Replay: engine.Replay(), Serving: serving,
				Identity: Identity{Model: "m", BlockSize: 4}, Decoder: decoder, Log: newMemory(), SilentAfter: time.Minute,
				Stop: stop, Observer: observing{unserved: func(why string) { unserved <- why }}})
		}()
		if everServed {
			accept(l)
			accept(l) // the first connection was seen to the end
			l.Close()
			next(refuses)
			l = listen()
			accept(l)
			next("")
			l.Close()
			next(refuses)
		}
		close(stop)
		if !everServed {
			next(refuses)
		}
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

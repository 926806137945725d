package shim

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestQuietSinceTheStart checks that an engine without messages for QuietAfter since the start is reported once, and
// once at its first message. An engine with a message is never reported again, for any pause.
func TestQuietSinceTheStart(t *testing.T) {
	for name, c := range map[string]struct {
		first time.Duration // when the engine publishes; 0: never
		want  string
	}{
		"never":         {0, "30s true"},
		"in time":       {29 * time.Second, ""},
		"after a while": {50 * time.Second, "30s true, 50s false"},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			began := time.Now()
			var said []string
			quiet := false
			feed := make(chan Frame)
			ended := make(chan error, 1)
			go func() {
				ended <- Run(ctx, Config{Feed: feed, Log: &keptLog{changed: make(chan struct{})},
					Identity: Identity{Model: "m", BlockSize: 16},
					Observer: observing{state: func(s State) {
						if s.Quiet != quiet {
							quiet = s.Quiet
							said = append(said, fmt.Sprint(time.Since(began), " ", quiet))
						}
					}}})
			}()
			if c.first > 0 {
				time.Sleep(c.first)
				feed <- Frame{Seq: 1, Read: &Read{Events: []events.Event{{Kind: events.Cleared, Tier: events.AllTiers}}}}
			}
			time.Sleep(time.Hour)
			cancel()
			if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			if got := strings.Join(said, ", "); got != c.want {
				t.Errorf("%s: %q, want %q", name, got, c.want)
			}
		})
	}
}

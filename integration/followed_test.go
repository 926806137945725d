package integration

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/twin"
)

// followed is a simulated engine with random prompts and the true state.
type followed struct {
	*enginesim.Engine
	rng    *rand.Rand
	hasher *events.Hasher

	mu    sync.Mutex
	truth *twin.Rank
}

func followEngine(t *testing.T, cfg enginesim.Config) *followed {
	f := &followed{rng: rand.New(rand.NewPCG(1, 2)), truth: harness.NewTruth()}
	var err error
	if f.hasher, err = events.NewHasher(harness.BlockSize, events.Space{}); err != nil {
		t.Fatal(err)
	}
	cfg.BlockSize, cfg.Capacity = harness.BlockSize, 600
	cfg.Announced = func(a enginesim.Announced) {
		e := events.Event{Kind: a.Kind, Tier: events.Device, HasParent: a.HasParent, Parent: a.Parent,
			Blocks: append([]events.BlockHash{}, a.Blocks...)}
		if a.Kind == events.Stored {
			e.Locals = f.hasher.Hash(nil, a.Tokens)
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		f.truth.Apply(1, []events.Event{e})
	}
	f.Engine, err = enginesim.Start(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Crash)
	return f
}

// prompt returns a prompt from a few families with common prefixes.
func (f *followed) prompt() []uint32 {
	family, length := f.rng.IntN(12), 1+f.rng.IntN(80)
	p := harness.Tokens(family*100_000, length*harness.BlockSize)
	for i := f.rng.IntN(length) * harness.BlockSize; i < len(p) && f.rng.IntN(2) == 0; i += 8 * harness.BlockSize {
		p[i]++
	}
	return p
}

func (f *followed) serve(t *testing.T, n int) {
	t.Helper()
	for range n {
		harness.ServePrompt(t, f.Engine, f.prompt())
	}
}

// judge compares answers for random prompts with the truth. With atMost, the index may have less.
func (f *followed) judge(addr, worker string, atMost bool) error {
	rng := rand.New(rand.NewPCG(3, 4))
	g := &followed{rng: rng, hasher: f.hasher}
	for range 60 {
		locals := f.hasher.Hash(nil, g.prompt())
		a, err := harness.FindLocals(addr, locals)
		if err != nil {
			return err
		}
		f.mu.Lock()
		want := f.truth.Match(locals)
		f.mu.Unlock()
		got := uint32(0)
		for _, o := range a.Workers {
			if string(o.Instance) == worker {
				got = o.Device
			}
		}
		if got != want[0] && !(atMost && got < want[0]) || !a.Complete {
			return fmt.Errorf("the engine holds %d blocks and the index has %d: %+v", want[0], got, a)
		}
	}
	return nil
}

func (f *followed) await(t *testing.T, addr string) {
	t.Helper()
	harness.Eventually(t, "the index has the engine's blocks", func() (bool, string) {
		err := f.judge(addr, "w1", false)
		return err == nil, fmt.Sprint(err)
	})
}

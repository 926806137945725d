package integration

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/pyenv"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// TestRealMooncakeMaster asks a real master about a real client's objects: hits, misses, odd keys, removal, and a restart.
func TestRealMooncakeMaster(t *testing.T) {
	real := pyenv.StartMooncake(t)
	real.StartClient()
	odd := []string{"a b", "a+b", "a%2Cb", "pre@m@tp_rank:0/ü|\"\n"}
	real.Put(append([]string{"plain"}, odd...)...)
	changed := make(chan string, 100)
	master, err := hicache.NewMooncake(hicache.MooncakeConfig{Address: real.HTTP, MaxKeys: 3, Check: 20 * time.Millisecond, Changed: func(why string) { changed <- why }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if _, err := master.Health(ctx); err != nil {
		t.Fatal(err)
	}
	keys := append([]string{"none", "with,comma", "not\xffutf8", "plain"}, odd...)
	present, known, err := master.Exists(ctx, keys)
	if !errors.Is(err, hicache.ErrKey) {
		t.Errorf("keys that cannot be asked for: %v", err)
	}
	for i, key := range keys {
		if known.Get(i) != (i != 1 && i != 2) || present.Get(i) != (i >= 3) {
			t.Errorf("%q: known %v, present %v", key, known.Get(i), present.Get(i))
		}
	}
	real.Remove("plain")
	if present, known, err := master.Exists(ctx, []string{"plain", "a b"}); err != nil || known.Count() != 2 || present.Get(0) || !present.Get(1) {
		t.Errorf("after removal: %v, present %b, known %b", err, present, known)
	}

	// A master that starts again has lost everything and says nothing of it; the broken connection does.
	for len(changed) > 0 {
		<-changed
	}
	real.KillMaster()
	select {
	case <-changed:
	case <-ctx.Done():
		t.Fatal("nobody was told that the master is gone")
	}
	if _, known, err := master.Exists(ctx, []string{"a b"}); err == nil || known.Count() != 0 {
		t.Errorf("a dead master: %v, %d known", err, known.Count())
	}
	real.StartMaster()
	if present, known, err := master.Exists(ctx, []string{"a b"}); err != nil || known.Count() != 1 || present.Count() != 0 {
		t.Errorf("a master that started again: %v, present %b", err, present)
	}
}

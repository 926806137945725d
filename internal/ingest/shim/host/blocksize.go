package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// A block size from an engine's HTTP API may be nominal: vLLM before 0.32 does not count context parallelism, so the
// blocks of its events have a multiple of the size. The first block stored on the device decides. Until then the model
// has no registered size, so an operator never needs to remove a wrong size.

// sizeError ends a run: the engine's blocks have another size than the nominal size.
type sizeError struct{ size uint32 }

func (e *sizeError) Error() string { return fmt.Sprintf("the engine's blocks have %d tokens", e.size) }

// sizeProof waits for the first block of an engine with a nominal block size. The ranks of the engine share it.
type sizeProof struct{ found chan uint32 }

func newSizeProof() *sizeProof { return &sizeProof{make(chan uint32, 1)} }

// report reports the size of a block. The first report counts.
func (p *sizeProof) report(size uint32) {
	select {
	case p.found <- size:
	default:
	}
}

// run registers the nominal size when the first block has the same size. run returns a *sizeError if the block has a
// multiple of the nominal size, and an error if the model is registered with another size.
func (p *sizeProof) run(ctx context.Context, s *Shim, ns *jetstream.Namespace) error {
	select {
	case <-ctx.Done():
		return nil
	case size := <-p.found:
		if size != s.BlockSize {
			return &sizeError{size}
		}
	}
	return IgnoreEnd(ctx, s.registerProven(ctx, ns))
}

// examine reports the nominal size if an event was decoded with this size.
func (p *sizeProof) examine(list []events.Event, nominal uint32) {
	for i := range list {
		if e := &list[i]; e.Kind == events.Stored && e.Tier == events.Device && len(e.Locals) > 0 {
			p.report(nominal)
			return
		}
	}
}

// nominalSize prepares a run with a nominal block size. A registered multiple of the nominal size replaces the nominal
// size. undecided means that the first block decides.
func (s *Shim) nominalSize(ctx context.Context, ns *jetstream.Namespace) (undecided bool, err error) {
	m, err := ns.Model(ctx, s.Model)
	switch {
	case errors.Is(err, jetstream.ErrNotFound):
		return true, nil
	case err != nil:
		return false, err
	case m.BlockSize%s.BlockSize == 0:
		s.BlockSize = m.BlockSize
	}
	return false, nil
}

// registerProven registers the model with its block size as soon as NATS permits.
func (s *Shim) registerProven(ctx context.Context, ns *jetstream.Namespace) error {
	for {
		err := ns.RegisterModel(ctx, jetstream.Model{Name: s.Model, BlockSize: s.BlockSize})
		if errors.Is(err, jetstream.ErrMismatch) {
			return otherSize(err, s.Model)
		}
		if err == nil || !loop.Wait(ctx, time.Second) {
			return nil
		}
	}
}

// otherSize adds the remedy to the error of a model whose registered block size differs.
func otherSize(err error, model string) error {
	return fmt.Errorf("%w; if no worker has the registered size any more: indexer models remove %s", err,
		escape.Operand(model))
}

package main

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

// A size that an engine reports over HTTP may be nominal: vLLM before 0.32 does not count context parallelism, so that
// the blocks of its events have a multiple of the size. The first block that is stored on the device decides. Until
// then the size is not registered for the model, so that a wrong one need not be forgotten.

// sizeError ends a run because the engine's blocks have another size than the nominal one.
type sizeError struct{ size uint32 }

func (e *sizeError) Error() string { return fmt.Sprintf("the engine's blocks have %d tokens", e.size) }

// sizeProof waits for the first block of an engine whose block size is nominal. Ranks of the engine share it.
type sizeProof struct{ found chan uint32 }

func newSizeProof() *sizeProof { return &sizeProof{make(chan uint32, 1)} }

// tell gives the size of a block. The first one counts.
func (p *sizeProof) tell(size uint32) {
	select {
	case p.found <- size:
	default:
	}
}

// run registers the nominal size when the first block has it. It returns a *sizeError if the block has a multiple of
// it, and the error of a model that is registered with another size.
func (p *sizeProof) run(ctx context.Context, r *running, ns *jetstream.Namespace) error {
	select {
	case <-ctx.Done():
		return nil
	case size := <-p.found:
		if size != r.blockSize {
			return &sizeError{size}
		}
	}
	return ignoreEnd(ctx, r.registerProven(ctx, ns))
}

// look takes events that were decoded with the nominal size.
func (p *sizeProof) look(list []events.Event, nominal uint32) {
	for i := range list {
		if e := &list[i]; e.Kind == events.Stored && e.Tier == events.Device && len(e.Locals) > 0 {
			p.tell(nominal)
			return
		}
	}
}

// nominalSize prepares a run with a nominal block size. If a multiple of it is registered for the model, that is the
// size. It reports whether the first block is to decide.
func (r *running) nominalSize(ctx context.Context, ns *jetstream.Namespace) (undecided bool, err error) {
	m, err := ns.Model(ctx, r.model)
	switch {
	case errors.Is(err, jetstream.ErrNotFound):
		return true, nil
	case err != nil:
		return false, err
	case m.BlockSize%r.blockSize == 0:
		r.blockSize = m.BlockSize
	}
	return false, nil
}

// registerProven registers the model with its block size as soon as NATS permits.
func (r *running) registerProven(ctx context.Context, ns *jetstream.Namespace) error {
	for {
		err := ns.RegisterModel(ctx, jetstream.Model{Name: r.model, BlockSize: r.blockSize})
		if errors.Is(err, jetstream.ErrMismatch) {
			return otherSize(err, r.model)
		}
		if err == nil || !loop.Wait(ctx, time.Second) {
			return nil
		}
	}
}

// otherSize is the error of a model that is registered with another block size, with the remedy.
func otherSize(err error, model string) error {
	return fmt.Errorf("%w; if no worker has that size any more: indexer forget --model %s", err, escape.Shell(model))
}

package jinja

import (
	"context"
	"errors"
	"time"
)

// Bounds of one rendering. The unit of work is one byte of text that is read or written.
const (
	MaxOutput = 64 << 20             // bytes of all texts and lists that are made on the way
	maxWork   = 4_000_000 * stepWork // of all steps and builtins together
	stepWork  = 1024                 // of one node of the template, or one item of a list
	checkWork = 256 * stepWork       // between two checks of the context; about 0.1 ms
	itemBytes = 16                   // of a value in a list
	dictBytes = 256                  // of a dictionary, namespace or macro, and of the first keys
	maxCalls  = 100                  // of macros within each other
	maxDepth  = 200                  // of values within each other
	maxEval   = 5000                 // of nodes within each other, in all macros that are called
)

// ErrTooMuch is the error of a rendering that exceeds a bound of its work, its memory or its depth.
var ErrTooMuch = errors.New("rendering the template takes too much")

// run is one rendering. It counts the work and ends the rendering at a bound, or soon after the context is done.
type run struct {
	ctx   context.Context
	now   time.Time
	work  int64
	check int64 // the work at which the context is checked next
	bytes int
	calls int
	depth int
}

// spend counts work.
func (r *run) spend(work int) error {
	if r.work += int64(work); work < 0 || r.work > maxWork {
		return ErrTooMuch
	}
	if r.work >= r.check {
		r.check = r.work + checkWork
		return r.ctx.Err()
	}
	return nil
}

// step counts the work of a node or an item.
func (r *run) step() error { return r.spend(stepWork) }

// made counts bytes of a text or a list, before it is made, and the work of making it.
func (r *run) made(n int) error {
	if r.bytes += n; n < 0 || r.bytes > MaxOutput {
		return ErrTooMuch
	}
	return r.spend(n)
}

// deeper counts a level of nodes. The caller decrements depth at the end of the level.
func (r *run) deeper() error {
	if r.depth++; r.depth > maxEval {
		return ErrTooMuch
	}
	return r.step()
}

// builtin is a filter, a test, a function or a method. All calls of builtins go through [run.invoke], which counts the
// size of all operands before the call.
type builtin struct {
	// do gets the value before the filter, the test or the method; a function gets nil.
	do func(r *run, v any, pos []any, kw []argument) (any, error)

	// counts is set if do counts its own work: it does not read its operands, or only by functions that count. The
	// size of the operands is not counted then.
	counts bool
}

// counted returns a builtin that counts its own work.
func counted(do func(r *run, v any, pos []any, kw []argument) (any, error)) builtin {
	return builtin{do: do, counts: true}
}

// invoke calls a builtin.
func (r *run) invoke(b builtin, v any, pos []any, kw []argument) (any, error) {
	work := stepWork
	if !b.counts {
		work += size(v)
		for _, v := range pos {
			work += size(v)
		}
		for _, a := range kw {
			work += size(a.val)
		}
	}
	if err := r.spend(work); err != nil {
		return nil, err
	}
	return b.do(r, v, pos, kw)
}

// size returns the bytes of a value, without those of its items.
func size(v any) int {
	switch v := v.(type) {
	case string:
		return len(v)
	case markup:
		return len(v)
	case big:
		return len(v)
	case undefined:
		return len(v.name)
	case *list:
		return itemBytes * len(v.items)
	case *Dict:
		return itemBytes * len(v.keys)
	}
	return 0
}

package jinja

import (
	"context"
	"errors"
	"time"
)

// Bounds of a rendering. The unit of work is one byte of text read or written.
const (
	MaxOutput = 64 << 20             // total bytes of all texts and lists
	maxWork   = 4_000_000 * stepWork // total work of all steps and builtins
	stepWork  = 1024                 // work of a node of the template, or of an item of a list
	checkWork = 256 * stepWork       // work between two checks of the context; about 0.1 ms
	itemBytes = 16                   // bytes of a list item
	dictBytes = 256                  // bytes of a dictionary with its first keys, of a namespace or a macro
	maxCalls  = 100                  // nesting of macro calls
	maxDepth  = 200                  // nesting of values
	maxEval   = 5000                 // nesting of nodes, over all active macros
)

// ErrTooMuch is returned by a rendering that exceeds a bound of its work, its memory or its depth.
var ErrTooMuch = errors.New("rendering the template exceeds a bound")

// run is one rendering. It counts the work. It ends the rendering at a bound, or soon after the context is done.
type run struct {
	ctx   context.Context
	now   time.Time
	work  int64
	check int64 // the work of the next check
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

// made counts the bytes of a text or list before the allocation, and the work of the allocation.
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

// builtin is a filter, a test, a function or a method. All calls go through [run.invoke], which counts the size of all
// operands before the call.
type builtin struct {
	// do receives the value before the filter, the test or the method; a function receives nil.
	do func(r *run, v any, pos []any, kw []argument) (any, error)

	// counts means that do counts its own work: it does not read its operands, or reads them only through functions
	// that count. Then invoke does not count the size of the operands.
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

// size returns the bytes of a value, without the bytes of its items.
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

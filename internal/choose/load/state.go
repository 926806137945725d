package load

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Weights of blocks are fixed-point numbers, so sums do not depend on the order of additions. The constant one is the
// weight of a whole block.
const (
	one  = 1 << 36
	half = one / 2
	// slack compensates rounding: three times 1/6 is a half. slack is far smaller than any difference between parts of
	// blocks.
	slack = one >> 20
)

// weightOf converts a fraction of 0 to 1 to a weight.
func weightOf(fraction float64) uint64 { return uint64(math.Round(fraction * one)) }

// state is the changing part of a request. Two states of a request join in any order and any number of times.
type state struct {
	done bool // the prefill is complete
	gone bool // the rank was removed: the request has no weight, but the id is in use

	extended uint32 // milliseconds from the booking to the last restart of the expiry

	outs []outCount // output blocks by receiving node, ordered by origin
	mark mark       // the last decay
	runs []run      // weights of the prompt's blocks since the last decay, or since the booking
}

// outCount is the number of output blocks reported to a node.
type outCount struct {
	origin uint64
	n      uint32
}

// mark is a decay: the weight of the first outputs. The field after is their number.
type mark struct {
	after  uint32 // the number of output blocks at that time; 0: no decay
	origin uint64 // the receiving node; if after is equal, the greater origin counts
	weight uint64
}

// run is the weight of a prompt's blocks from a block to the next run. Blocks before the first run are whole.
type run struct {
	from   uint32
	weight uint64
}

// progress returns the time from the booking to the last restart of the expiry.
func (s *state) progress() time.Duration { return time.Duration(s.extended) * time.Millisecond }

func (s *state) outputs() (n uint64) {
	for _, o := range s.outs {
		n += uint64(o.n)
	}
	return n
}

// unsharedWeight returns the weight of blocks that are never shared: outputs, and private blocks of the prompt.
func (s *state) unsharedWeight(private uint32) uint64 {
	n := s.outputs()
	if s.mark.after == 0 {
		return (uint64(private) + n) * one
	}
	return (uint64(private)+uint64(s.mark.after))*s.mark.weight + (n-uint64(s.mark.after))*one
}

// weightAt returns the weight of block i of a prompt.
func weightAt(runs []run, i int) uint64 {
	w := uint64(one)
	for _, r := range runs {
		if int(r.from) > i {
			break
		}
		w = r.weight
	}
	return w
}

// addRun returns runs with the weight w for all blocks from from on.
func addRun(runs []run, from int, w uint64) []run {
	k := len(runs)
	for k > 0 && int(runs[k-1].from) >= from {
		k--
	}
	last := uint64(one)
	if k > 0 {
		last = runs[k-1].weight
	}
	out := slices.Clone(runs[:k])
	if last != w {
		out = append(out, run{uint32(from), w})
	}
	return out
}

// join returns the union of two states of a request.
func (s state) join(o state) state {
	s.done, s.gone = s.done || o.done, s.gone || o.gone
	s.extended = max(s.extended, o.extended)
	if compareMarks(o.mark, s.mark) > 0 {
		s.mark, s.runs = o.mark, o.runs
	}
	outs, changed := s.outs, false
	for _, c := range o.outs {
		at, ok := slices.BinarySearchFunc(outs, c.origin, compareOrigins)
		if ok && outs[at].n >= c.n {
			continue
		}
		if !changed {
			outs, changed = slices.Clone(outs), true
		}
		if ok {
			outs[at] = c
		} else {
			outs = slices.Insert(outs, at, c)
		}
	}
	s.outs = outs
	return s
}

func compareOrigins(o outCount, origin uint64) int { return cmp.Compare(o.origin, origin) }

func compareMarks(a, b mark) int {
	return cmp.Or(cmp.Compare(a.after, b.after), cmp.Compare(a.origin, b.origin), cmp.Compare(a.weight, b.weight))
}

func (s *state) equal(o *state) bool {
	return s.done == o.done && s.gone == o.gone && s.extended == o.extended && s.mark == o.mark &&
		slices.Equal(s.outs, o.outs) && slices.Equal(s.runs, o.runs)
}

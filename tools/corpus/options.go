package corpus

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvatlas/kvatlas/tools/trace"
)

// Evict is how an engine makes room.
type Evict string

// Names is how workers call blocks.
type Names string

// The ways.
const (
	LRU    Evict = "lru"    // least recently used first, tails before heads: no holes
	Random Evict = "random" // any copy of any block: holes and second copies
	Holes  Evict = "holes"  // any block, but blocks behind a hole stay, so no second copies exist

	Shared  Names = "shared"  // a block has the same engine hash on all workers
	Private Names = "private" // every worker has different hashes, as engines with a random hash seed
)

// Options configures the fleet and the trace. Start with [Defaults].
type Options struct {
	Workers   int   // sharing the requests. Default 64
	Capacity  int   // capacity of a worker in blocks. Default 60,000
	BlockSize int   // tokens per block; divides 512. Default 16
	Requests  int   // number of requests from the trace; 0: all. Default 0
	Repeat    int   // number of passes over the trace, with different contents. Default 1
	Everyone  bool  // every worker serves every request, so all workers hold all blocks. Default false
	Evict     Evict // default LRU
	Names     Names // default Shared
	// share of requests sent to the last worker of the longest prefix, 0 to 1. Default 0.8
	Sticky float64
}

// Defaults are the options of the corpus conv64.
func Defaults() Options {
	return Options{Workers: 64, Capacity: 60000, BlockSize: 16, Repeat: 1, Evict: LRU, Names: Shared, Sticky: 0.8}
}

// Validate returns all faults of the options.
func (o Options) Validate() error {
	var wrong []error
	complain := func(bad bool, format string, args ...any) {
		if bad {
			wrong = append(wrong, fmt.Errorf(format, args...))
		}
	}
	// a worker is 20 bits of a digest
	complain(o.Workers <= 0 || o.Workers > 1<<20, "workers: %d, want 1 to %d", o.Workers, 1<<20)
	complain(o.Capacity <= 0 || o.Capacity > 1<<30, "capacity: %d, want 1 to %d", o.Capacity, 1<<30)
	complain(o.Requests < 0, "requests: %d, want 0 (all) or more", o.Requests)
	complain(o.Repeat <= 0, "repeat: %d, want at least 1", o.Repeat)
	complain(!(o.Sticky >= 0 && o.Sticky <= 1), "sticky: %v, want 0 to 1", o.Sticky)
	complain(!slices.Contains([]Evict{LRU, Random, Holes}, o.Evict), "evict: %q, want %q, %q or %q", o.Evict, LRU,
		Random, Holes)
	complain(o.Names != Shared && o.Names != Private, "names: %q, want %q or %q", o.Names, Shared, Private)
	if err := trace.CheckBlockSize(o.BlockSize); err != nil {
		wrong = append(wrong, err)
	}
	return errors.Join(wrong...)
}

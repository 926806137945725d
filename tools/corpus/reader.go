package corpus

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Op is an operation. The slices belong to the [Reader] and must not be changed.
type Op struct {
	Kind      Kind
	HasParent bool // of a store: the first block follows Parent
	Worker    uint32
	Parent    events.BlockHash
	Blocks    []events.BlockHash // store, remove
	Locals    []events.LocalHash // store, query
}

// Reader is a corpus in memory: an array of operations, an array of engine hashes, and two arrays of local hashes for
// stores and queries. The arrays of hashes are outside of the Go heap, so they do not change the cost and the frequency
// of garbage collections. They use huge pages if available. A real caller has just computed the hashes and does not
// wait for page tables. The programs of tools/peers for comparison use huge pages in the same way.
type Reader struct {
	header  Header
	ops     []place
	blocks  []events.BlockHash
	locals  []events.LocalHash // of stores
	prompts []events.LocalHash // of queries
	free    []func() error
}

// place is an operation with the position of its hashes.
type place struct {
	kind      Kind
	hasParent bool
	worker    uint32
	n         uint32
	parent    events.BlockHash
	blocks    uint64 // store, remove: blocks[blocks:][:n]
	locals    uint64 // store: locals[locals:][:n]; query: prompts[locals:][:n]
}

// Open reads a whole corpus file. An error about the content wraps [ErrFormat] and states the position.
func Open(path string) (*Reader, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open corpus: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("open corpus: %w", err)
	}
	r, err := Read(f, info.Size())
	if err != nil {
		return nil, fmt.Errorf("open corpus: %s: %w", path, err)
	}
	return r, nil
}

// Read reads a corpus of size bytes. The allocated memory is proportional to size.
func Read(from io.Reader, size int64) (*Reader, error) {
	in := &input{r: bufio.NewReaderSize(from, 1<<20), left: size}
	head, err := in.read(int(min(headerSize, max(size, 0))))
	if err != nil {
		return nil, err
	}
	r := &Reader{}
	if r.header, err = decodeHeader(head, size); err != nil {
		return nil, err
	}
	if err := r.read(in); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

func (r *Reader) read(in *input) error {
	var err error
	if r.blocks, err = array[events.BlockHash](r, r.header.Stored+r.header.Removed); err != nil {
		return err
	}
	if r.locals, err = array[events.LocalHash](r, r.header.Stored); err != nil {
		return err
	}
	if r.prompts, err = array[events.LocalHash](r, r.header.QueryBlocks); err != nil {
		return err
	}
	r.ops = make([]place, 0, r.header.Ops)
	seen := Header{Workers: r.header.Workers, BlockSize: r.header.BlockSize, LiveAtEnd: r.header.LiveAtEnd,
		DistinctAtEnd: r.header.DistinctAtEnd}
	for range r.header.Ops {
		if err := r.readOp(in, &seen); err != nil {
			return fmt.Errorf("operation %d: %w", len(r.ops), err)
		}
	}
	if seen != r.header {
		return fmt.Errorf("%w: the header counts %+v, the operations make %+v", ErrFormat, r.header, seen)
	}
	return nil
}

// readOp reads an operation and adds it to the counts in seen.
func (r *Reader) readOp(in *input, seen *Header) error {
	b, err := in.read(opSize)
	if err != nil {
		return err
	}
	kind, flags := Kind(b[0]), b[1]
	p := place{
		kind: kind, hasParent: flags&flagParent != 0,
		worker: binary.LittleEndian.Uint32(b[4:]), n: binary.LittleEndian.Uint32(b[8:]),
		blocks: seen.Stored + seen.Removed, locals: seen.Stored,
	}
	switch {
	case flags&^flagParent != 0 || b[2] != 0 || b[3] != 0:
		return fmt.Errorf("%w: unknown flags % x", ErrFormat, b[1:4])
	case p.hasParent && kind != Store:
		return fmt.Errorf("%w: a %v with a parent", ErrFormat, kind)
	case kind != Query && p.worker >= r.header.Workers:
		return fmt.Errorf("%w: worker %d of %d", ErrFormat, p.worker, r.header.Workers)
	}
	n := uint64(p.n)
	seen.Ops++
	switch kind {
	case Store:
		seen.StoreOps++
		if seen.Stored += n; seen.Stored > r.header.Stored {
			return fmt.Errorf("%w: %d blocks, beyond the %d stored blocks of the header", ErrFormat, n, r.header.Stored)
		}
		err = r.readStore(in, &p)
	case Remove:
		seen.RemoveOps++
		if seen.Removed += n; seen.Removed > r.header.Removed {
			return fmt.Errorf("%w: %d blocks, beyond the %d removed blocks of the header", ErrFormat, n, r.header.Removed)
		}
		err = each(in, 8, p.n, func(i uint64, b []byte) {
			r.blocks[p.blocks+i] = events.BlockHash(binary.LittleEndian.Uint64(b))
		})
	case Query:
		seen.Queries++
		p.locals = seen.QueryBlocks
		if seen.QueryBlocks += n; seen.QueryBlocks > r.header.QueryBlocks {
			return fmt.Errorf("%w: %d blocks, beyond the %d queried blocks of the header", ErrFormat, n,
				r.header.QueryBlocks)
		}
		err = each(in, 8, p.n, func(i uint64, b []byte) {
			r.prompts[p.locals+i] = events.LocalHash(binary.LittleEndian.Uint64(b))
		})
	default:
		return fmt.Errorf("%w: unknown %v", ErrFormat, kind)
	}
	if err != nil {
		return err
	}
	r.ops = append(r.ops, p)
	return nil
}

func (r *Reader) readStore(in *input, p *place) error {
	b, err := in.read(8)
	if err != nil {
		return err
	}
	if p.parent = events.BlockHash(binary.LittleEndian.Uint64(b)); p.parent != 0 && !p.hasParent {
		return fmt.Errorf("%w: parent %#x without the flag", ErrFormat, p.parent)
	}
	return each(in, 16, p.n, func(i uint64, b []byte) {
		r.blocks[p.blocks+i] = events.BlockHash(binary.LittleEndian.Uint64(b))
		r.locals[p.locals+i] = events.LocalHash(binary.LittleEndian.Uint64(b[8:]))
	})
}

// input is the unread rest of a file.
type input struct {
	r    *bufio.Reader
	left int64
}

// read reads n bytes. n must not exceed the buffer. The result is valid until the next call.
func (in *input) read(n int) ([]byte, error) {
	if int64(n) > in.left {
		return nil, fmt.Errorf("%w: ends %d bytes too early", ErrFormat, int64(n)-in.left)
	}
	b, err := in.r.Peek(n)
	if err == io.EOF {
		return nil, fmt.Errorf("%w: ends %d bytes too early", ErrFormat, in.left-int64(len(b)))
	}
	if err != nil {
		return nil, err
	}
	in.r.Discard(n)
	in.left -= int64(n)
	return b, nil
}

// each reads n records of the given width.
func each(in *input, width int, n uint32, record func(i uint64, b []byte)) error {
	const most = 4096 // records at a time
	for i := uint64(0); i < uint64(n); {
		b, err := in.read(width * int(min(most, uint64(n)-i)))
		if err != nil {
			return err
		}
		for ; len(b) > 0; b = b[width:] {
			record(i, b)
			i++
		}
	}
	return nil
}

// Header returns the header of the corpus. Open has checked the counts of operations and blocks.
func (r *Reader) Header() Header { return r.header }

// Len is how many operations there are.
func (r *Reader) Len() int { return len(r.ops) }

// Op returns operation i, from 0. It does not allocate.
func (r *Reader) Op(i int) Op {
	p := &r.ops[i]
	op := Op{Kind: p.kind, HasParent: p.hasParent, Worker: p.worker, Parent: p.parent}
	switch p.kind {
	case Store:
		op.Blocks, op.Locals = r.blocks[p.blocks:][:p.n:p.n], r.locals[p.locals:][:p.n:p.n]
	case Remove:
		op.Blocks = r.blocks[p.blocks:][:p.n:p.n]
	case Query:
		op.Locals = r.prompts[p.locals:][:p.n:p.n]
	}
	return op
}

// Ops iterates over all operations in the order of the file, with the number.
func (r *Reader) Ops() iter.Seq2[int, Op] {
	return func(yield func(int, Op) bool) {
		for i := range r.ops {
			if !yield(i, r.Op(i)) {
				return
			}
		}
	}
}

// Close frees the memory. No operation may be in use during and after Close. A second call is harmless.
func (r *Reader) Close() error {
	var wrong error
	for _, free := range r.free {
		wrong = errors.Join(wrong, free())
	}
	*r = Reader{header: r.header}
	return wrong
}

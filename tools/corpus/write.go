package corpus

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"

	"github.com/kvatlas/kvatlas/tools/trace"
)

// Write serves the requests with the fleet of the options and writes the corpus to w. w must be empty. The header is
// written again at the end with the final counts. The end of ctx stops Write with the error of ctx.
func Write(ctx context.Context, o Options, reqs []trace.Request, w io.WriteSeeker) (Header, error) {
	if err := o.Validate(); err != nil {
		return Header{}, fmt.Errorf("make corpus: %w", err)
	}
	if o.Requests > 0 && o.Requests < len(reqs) {
		reqs = reqs[:o.Requests]
	}
	out := &output{w: bufio.NewWriterSize(w, 1<<20), private: o.Names == Private}
	out.header.Workers, out.header.BlockSize = uint32(o.Workers), uint32(o.BlockSize)
	out.w.Write(out.header.encode())
	f := newFleet(o, out)
	for round := range o.Repeat {
		salt := Mix(uint64(round) + 7)
		for number, r := range reqs {
			if err := ctx.Err(); err != nil {
				return Header{}, fmt.Errorf("make corpus: %w", err)
			}
			f.serve(r, number, salt)
		}
	}
	f.count()
	err := out.w.Flush()
	if err == nil {
		_, err = w.Seek(0, io.SeekStart)
	}
	if err == nil {
		_, err = w.Write(out.header.encode())
	}
	if err != nil {
		return Header{}, fmt.Errorf("make corpus: %w", err)
	}
	return out.header, nil
}

// fleet is the workers with the router. The order of random numbers is part of the format.
type fleet struct {
	o       Options
	out     *output
	engines []engine
	rng     *rand.Rand
	served  map[uint64]uint32 // maps the block at every 512th token of a prompt to the last worker
	all     []uint32          // every worker

	blocks, locals, gone, added []uint64 // of the request in hand
}

func newFleet(o Options, out *output) *fleet {
	f := &fleet{o: o, out: out, rng: rand.New(rand.NewPCG(1337, 42)), served: map[uint64]uint32{}}
	for i := range o.Workers {
		f.engines = append(f.engines, newEngine(o.Evict, i))
		f.all = append(f.all, uint32(i))
	}
	return f
}

// serve writes the router's query, chooses the workers for the request, and serves the request.
func (f *fleet) serve(r trace.Request, number int, salt uint64) {
	prompt := f.hash(r, number, salt)
	f.out.query(f.locals[:prompt])
	to := []uint32{f.route(prompt)}
	if f.o.Everyone {
		to = f.all
	}
	for _, worker := range to {
		f.compute(worker, prompt)
	}
	per := trace.BlockTokens / f.o.BlockSize
	for i := per - 1; i < prompt; i += per {
		f.served[f.blocks[i]] = to[0]
	}
}

// hash computes the local hashes and shared names of a request's full blocks, the prompt before the answer. It returns
// the number of blocks of the prompt.
func (f *fleet) hash(r trace.Request, number int, salt uint64) (prompt int) {
	const engineSeed, answerSeed = 0x656e67696e65, 0x616e73776572 // "engine", "answer"
	per := trace.BlockTokens / f.o.BlockSize
	prompt = min(r.InputLength/f.o.BlockSize, len(r.HashIDs)*per)
	f.blocks, f.locals = f.blocks[:0], f.locals[:0]
	name := Mix(salt ^ engineSeed)
	for i := range prompt + r.OutputLength/f.o.BlockSize {
		var content uint64
		if i < prompt {
			content = Mix(Mix(r.HashIDs[i/per]+1)^salt) + uint64(i%per)
		} else {
			content = Mix(uint64(number)<<32 ^ uint64(i) ^ salt ^ answerSeed)
		}
		local := Mix(content)
		name = Mix(name ^ local)
		f.blocks, f.locals = append(f.blocks, name), append(f.locals, local)
	}
	return prompt
}

// route returns a random worker, or the last worker of the prompt's longest prefix of whole 512-token parts. The first
// 512 tokens do not count, because all prompts of a trace may share them.
func (f *fleet) route(prompt int) uint32 {
	anyone := f.rng.Uint32N(uint32(f.o.Workers))
	if f.o.Everyone || f.rng.Float64() >= f.o.Sticky {
		return anyone
	}
	per := trace.BlockTokens / f.o.BlockSize
	for i := prompt/per*per - 1; i >= per; i -= per {
		if worker, known := f.served[f.blocks[i]]; known {
			return worker
		}
	}
	return anyone
}

// compute serves the current request on a worker.
func (f *fleet) compute(worker uint32, prompt int) {
	e := f.engines[worker]
	fresh := 0
	for fresh < len(f.blocks) && e.holds(f.blocks[fresh]) {
		fresh++
	}
	if f.o.Evict == Holes {
		f.fill(worker, prompt, fresh)
		return
	}
	if fresh < prompt {
		f.out.store(worker, f.blocks, f.locals, fresh, prompt)
	}
	for i := max(fresh, prompt); i < len(f.blocks); i++ {
		f.out.store(worker, f.blocks, f.locals, i, i+1)
	}
	e.use(f.blocks, fresh)
	f.gone = e.shrink(f.o.Capacity, f.gone[:0])
	f.out.remove(worker, f.gone)
}

// fill computes the missing blocks on a worker. It stores no held block.
func (f *fleet) fill(worker uint32, prompt, fresh int) {
	e := f.engines[worker]
	f.added = f.added[:0]
	for i := fresh; i < len(f.blocks); i++ {
		if e.holds(f.blocks[i]) {
			continue
		}
		end := i + 1
		for end < prompt && !e.holds(f.blocks[end]) {
			end++
		}
		f.out.store(worker, f.blocks, f.locals, i, end)
		f.added = append(f.added, f.blocks[i:end]...)
		i = end - 1
	}
	e.use(f.added, 0)
	f.gone = e.shrink(f.o.Capacity, f.gone[:0])
	f.out.remove(worker, f.gone)
}

// count completes the header.
func (f *fleet) count() {
	h := &f.out.header
	distinct := map[uint64]struct{}{}
	for _, e := range f.engines {
		for block := range e.held() {
			h.LiveAtEnd++
			distinct[block] = struct{}{}
		}
	}
	h.DistinctAtEnd = uint64(len(distinct))
}

// output writes operations and counts them. flush returns errors of the writer.
type output struct {
	w       *bufio.Writer
	header  Header
	private bool
}

// name returns a worker's name of a block.
func (out *output) name(worker uint32, block uint64) uint64 {
	if out.private {
		return Mix(block ^ (uint64(worker)+1)*0xd6e8feb86659fd93)
	}
	return block
}

func (out *output) op(kind Kind, flags byte, worker uint32, n int) {
	var b [opSize]byte
	b[0], b[1] = byte(kind), flags
	binary.LittleEndian.PutUint32(b[4:], worker)
	binary.LittleEndian.PutUint32(b[8:], uint32(n))
	out.w.Write(b[:])
	out.header.Ops++
}

func (out *output) number(x uint64) {
	out.w.Write(binary.LittleEndian.AppendUint64(out.w.AvailableBuffer(), x))
}

func (out *output) query(locals []uint64) {
	if len(locals) == 0 {
		return
	}
	out.op(Query, 0, 0, len(locals))
	for _, local := range locals {
		out.number(local)
	}
	out.header.Queries++
	out.header.QueryBlocks += uint64(len(locals))
}

// store writes a store operation of a worker with the blocks from first up to end.
func (out *output) store(worker uint32, blocks, locals []uint64, first, end int) {
	flags, parent := byte(0), uint64(0)
	if first > 0 {
		flags, parent = flagParent, out.name(worker, blocks[first-1])
	}
	out.op(Store, flags, worker, end-first)
	out.number(parent)
	for i := first; i < end; i++ {
		out.number(out.name(worker, blocks[i]))
		out.number(locals[i])
	}
	out.header.StoreOps++
	out.header.Stored += uint64(end - first)
}

func (out *output) remove(worker uint32, blocks []uint64) {
	if len(blocks) == 0 {
		return
	}
	out.op(Remove, 0, worker, len(blocks))
	for _, block := range blocks {
		out.number(out.name(worker, block))
	}
	out.header.RemoveOps++
	out.header.Removed += uint64(len(blocks))
}

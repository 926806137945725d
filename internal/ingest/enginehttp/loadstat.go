package enginehttp

import (
	"errors"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// LoadStatSource is the source of the loads of SGLang's load socket.
const LoadStatSource = SGLang + " load socket"

// errLoadStat is the error for a message without a LoadStat.
var errLoadStat = errors.New("the message has no LoadStat of SGLang's")

// LoadStat decodes a message of SGLang's load socket. The last frame has a MessagePack array (LoadStat in
// sgl-project/sglang › python/sglang/srt/managers/scheduler_components/load_publisher.py):
//
//	"LoadStat" │ running │ waiting │ tokens │ max_total_num_tokens │ rank or nil │ waiting uncached tokens │ ...
//
// Old releases end after the rank, and later releases may append values. blockSize is the size of a block in tokens.
// The caller sets the rank, because each rank has its own socket.
func LoadStat(frames [][]byte, blockSize uint32) (Load, error) {
	if len(frames) != 3 {
		return Load{}, errLoadStat
	}
	r := msgp.Reader{Data: frames[2]}
	n, _ := r.Array()
	tag, _ := r.Str()
	if n < 6 || string(tag) != "LoadStat" {
		return Load{}, errLoadStat
	}
	number := func() uint64 {
		v, ok := r.Uint(1<<63 - 1)
		r.Broken = r.Broken || !ok
		return v
	}
	l := Load{Running: number(), Waiting: number(), Source: LoadStatSource}
	used, most := number(), number()
	r.Skip() // the rank
	if n > 6 {
		waiting := number()
		l.WaitingTokens = &waiting
		r.SkipN(n - 7)
	}
	if r.Broken || r.Left() > 0 {
		return Load{}, errLoadStat
	}
	l.setTokens(used, most, uint64(blockSize))
	return l, nil
}

// setTokens sets the blocks in device memory from numbers of tokens.
func (l *Load) setTokens(used, most, blockSize uint64) {
	if most > 0 && blockSize > 0 {
		l.UsedBlocks, l.TotalBlocks = (used+blockSize-1)/blockSize, most/blockSize
	}
}

package events

import (
	"bytes"
	"math"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/zeebo/xxh3"
)

// TensorRT-LLM's ZMQ publisher (NVIDIA/TensorRT-LLM › tensorrt_llm/_torch/pyexecutor/kv_cache_events.py, #17023) writes
// vLLM's events as maps, with the images of each block in the field mm_keys.
//
// The engine replaces an image's tokens before it names blocks (gen_multimodal_cache_key_tokens): the first by the
// image's digest, and the k-th after it by S+k, where S is usually the size of the vocabulary. An event shows the
// digest as text among the numbers, and a key with start_offset 0 for it. In a later block the key's start_offset is
// the k of the first token there (decodeEventBlock in
// cpp/tensorrt_llm/batch_manager/kv_cache_manager_v2/eventData.cpp). The digest is hashed as the number S. A publisher
// without digests among its tokens gives start_offset the meaning that vLLM's extra_keys give it: the image's first
// token, counted from the block's first one.

// digest is an image's digest among an event's tokens.
type digest struct {
	at    int    // its place among the event's tokens
	text  []byte // of the payload
	named bool   // mm_keys have it
}

// readDigests reads the remaining tokens of n. The next one is not a number.
func (d *Decoder) readDigests(r *msgp.Reader, n int) {
	for len(d.tokens) < n {
		if v, ok := r.Uint(math.MaxUint32); ok {
			d.tokens = append(d.tokens, uint32(v))
			continue
		}
		text, ok := r.Str()
		if !ok {
			d.raw.passStored(skipToken)
			r.SkipN(n - len(d.tokens))
			return
		}
		d.digests = append(d.digests, digest{at: len(d.tokens), text: text})
		d.tokens = append(d.tokens, 0)
	}
}

// mediaRun is the image of the last key.
type mediaRun struct {
	name   []byte
	begin  int64 // the first token, counted from the event's beginning
	listed int   // the last block with a key of the image
}

// readMediaKeys reads mm_keys: for each of n blocks a list of the block's images. An image has a key for each
// stretch of tokens, since text may separate the tokens. The result is false for unreadable keys.
func (d *Decoder) readMediaKeys(e *rawEvent, n int) bool {
	if e.mediaKeys[1] == 0 {
		return true
	}
	r, some, ok := e.blockValues(e.mediaKeys, n)
	if !some {
		return ok
	}
	if len(d.media.values) > 0 {
		return false // extra_keys have images too
	}
	d.media.reset()
	run, digests := mediaRun{listed: -1}, d.digests
	for i := range n {
		keys, ok := r.Array()
		if !ok && !r.Null() {
			return false
		}
		if len(d.media.values)+keys > maxEventTokens {
			e.passStored(skipTooLarge)
			return true
		}
		for range keys {
			name, start, ok := readMediaKey(&r)
			if !ok {
				return false
			}
			begin := int64(i) * int64(d.block)
			same := bytes.Equal(name, run.name)
			switch {
			case start == 0 && len(digests) > 0 && digests[0].in(begin, d.block) && bytes.Equal(digests[0].text, name):
				digests[0].named = true
				d.learnStandIns(digests)
				run = mediaRun{name, int64(digests[0].at), -1}
				digests = digests[1:]
			case same && start > 0 && (d.standIns > 0 || run.listed < i && d.goesOn(run, begin, start)):
				// more of the same image
			case d.standIns > 0 && start > 0:
				run = mediaRun{name, begin + d.standInAt(begin, start) - start, -1}
			case start >= int64(d.block):
				run = mediaRun{name, begin - start, -1}
			default:
				run = mediaRun{name, begin + start, -1}
			}
			if run.listed < i {
				run.listed = i
				d.media.add(BlockMedia{xxh3.Hash(name), run.begin - begin})
			}
		}
		d.media.end()
	}
	return true
}

// goesOn reports whether a key of a block that begins there counts the tokens of an image from a block before. The
// tokens on both sides are consecutive numbers or the same one, as in images.
func (d *Decoder) goesOn(run mediaRun, begin, start int64) bool {
	return run.begin+start == begin && d.tokens[begin]-d.tokens[begin-1] <= 1
}

func (g *digest) in(begin int64, size uint32) bool {
	return int64(g.at) >= begin && int64(g.at) < begin+int64(size)
}

// readMediaKey reads one image of a block. The uuid is skipped, since the hash identifies the image.
func readMediaKey(r *msgp.Reader) (name []byte, start int64, ok bool) {
	fields, ok := r.Map()
	placed := false
	for ; ok && fields > 0; fields-- {
		key, isText := r.Str()
		switch {
		case !isText:
			ok = r.SkipN(2)
		case string(key) == "hash":
			name, ok = r.Str()
		case string(key) == "start_offset":
			var bits uint64
			bits, _, ok = r.Int()
			start, placed = int64(bits), true
		default:
			ok = r.Skip()
		}
	}
	return name, start, ok && placed && len(name) > 0 && start >= math.MinInt32 && start <= math.MaxInt32
}

// learnStandIns learns the number for an image's first token: one less than the token after the first digest.
// Text follows an image of one token, with smaller numbers, so the largest number is kept.
func (d *Decoder) learnStandIns(digests []digest) {
	next := digests[0].at + 1
	if next < len(d.tokens) && (len(digests) == 1 || digests[1].at != next) && d.tokens[next] > 0 {
		d.standIns = max(d.standIns, d.tokens[next]-1)
	}
}

// standInAt returns the place of an image's start-th token in the block at begin, or 0 if the block lacks the token.
func (d *Decoder) standInAt(begin, start int64) int64 {
	for i, token := range d.tokens[begin : begin+int64(d.block)] {
		if int64(token) == int64(d.standIns)+start {
			return int64(i)
		}
	}
	return 0
}

// placeStandIns replaces digests by numbers. It returns how many of n blocks can be hashed: all blocks before a digest
// that mm_keys do not have.
func (d *Decoder) placeStandIns(n int) int {
	for _, g := range d.digests {
		if !g.named {
			return min(n, g.at/int(d.block))
		}
		d.tokens[g.at] = d.standIns
	}
	return n
}

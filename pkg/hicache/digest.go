package hicache

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/zeebo/xxh3"
)

// ErrNames means that the names of a prompt's blocks depend on unknown inputs. The text has the reason. The caller then
// does not query the store.
var ErrNames = errors.New("the names of the prompt's blocks in the store are unknown")

// Hash algorithms of vLLM (--prefix-caching-hash-algo). The input is a Python pickle or canonical CBOR.
const (
	algoSHA256     = "sha256"
	algoSHA256CBOR = "sha256_cbor"
	algoXXH3       = "xxhash"
	algoXXH3CBOR   = "xxhash_cbor"
)

// maxPickled is the maximum number of tokens of a pickled hash block. Python divides pickles of more than 64 KiB into
// frames.
const maxPickled = 8192

// fixedSeed is the seed of vLLM's first hash without PYTHONHASHSEED, from release fixedSeedSince on and only for
// SHA-256 (vllm-project/vllm › vllm/v1/core/kv_cache_utils.py, init_none_hash). In older releases and with xxHash, the
// seed is random in each process.
const fixedSeed = "vllm-none-hash"

var (
	fixedSeedSince = version{0, 29, 0}
	taggedSince    = version{0, 31, 0} // extra keys of a hash have a tag
)

func (v *VLLM) algo() string { return cmp.Or(v.HashAlgo, algoSHA256) }

func (v *VLLM) cbor() bool   { return strings.HasSuffix(v.algo(), "_cbor") }
func (v *VLLM) sha256() bool { return strings.HasPrefix(v.algo(), algoSHA256) }

func (v *VLLM) digestSize() int {
	if v.sha256() {
		return sha256.Size
	}
	return 16
}

// seed returns the seed of the first hash.
func (v *VLLM) seed() (string, error) {
	switch {
	case v.HashSeed != nil:
		return *v.HashSeed, nil
	case v.EngineVersion == "":
		return "", fmt.Errorf("%w: the workers registered neither hash_seed (their PYTHONHASHSEED) nor engine_version",
			ErrNames)
	case v.sha256() && since(v.EngineVersion, fixedSeedSince):
		return fixedSeed, nil
	}
	return "", fmt.Errorf(
		"%w: vLLM %s hashes blocks with a seed that is random in each process: set PYTHONHASHSEED and register the value as hash_seed", ErrNames, v.EngineVersion)
}

// nameable returns an error if the hashes of prompts with an adapter and a salt are unknown.
func (v *VLLM) nameable(lora, salt string) error {
	_, err := v.seed()
	switch {
	case err != nil:
		return err
	case v.before(namesSince):
		return fmt.Errorf("%w: vLLM %s names objects differently; supported are 0.24 and later", ErrNames,
			v.EngineVersion)
	case (lora != "" || salt != "") && v.EngineVersion == "":
		return fmt.Errorf(
			"%w: the hashing of adapters and cache salts depends on the release, and the workers registered no engine_version", ErrNames)
	case lora != "" && since(v.EngineVersion, taggedSince):
		return fmt.Errorf("%w: since 0.31 vLLM hashes the path of a LoRA adapter, and the query has the name", ErrNames)
	case lora != "" && lora == salt && !v.cbor():
		return fmt.Errorf("%w: a cache salt that is the adapter's name is pickled in a way that depends on the process",
			ErrNames)
	}
	return nil
}

// Digests appends vLLM's digests of a prompt's hash blocks to dst. A hash block has HashBlockSize tokens. dst has the
// digests of the first hash blocks, or none. A digest of 16 bytes is the start of a PageHash with zeros after. The hash
// includes the adapter's name and the cache salt. The error wraps ErrNames. v must have passed Check.
func (v *VLLM) Digests(dst []PageHash, tokens []uint32, lora, salt string) ([]PageHash, error) {
	if err := v.nameable(lora, salt); err != nil {
		return dst, err
	}
	seed, _ := v.seed() // nameable has checked the seed
	tagged := since(v.EngineVersion, taggedSince)
	e := encoder{cbor: v.cbor()}
	sum := func() (h PageHash) {
		if v.sha256() {
			return sha256.Sum256(e.bytes())
		}
		d := xxh3.Hash128(e.bytes()).Bytes()
		copy(h[:], d[:])
		return h
	}
	var prior PageHash
	if n := len(dst); n > 0 {
		prior = dst[n-1]
	} else {
		e.begin()
		e.text(seed)
		prior = sum()
	}
	for {
		first := len(dst) * v.HashBlockSize
		end := first + v.HashBlockSize
		if end+v.HashLookahead > len(tokens) {
			return dst, nil
		}
		e.begin()
		e.tuple(3)
		e.binary(prior[:v.digestSize()])
		e.tuple(v.HashBlockSize)
		for _, t := range tokens[first:end] {
			e.number(t)
		}
		e.close(v.HashBlockSize)
		if v.HashLookahead > 0 {
			e.tuple(1 + v.HashLookahead)
		}
		e.extra(lora, salt, first == 0, tagged)
		if v.HashLookahead > 0 {
			for _, t := range tokens[end : end+v.HashLookahead] {
				e.number(t)
			}
			e.close(1 + v.HashLookahead)
		}
		e.close(3)
		prior = sum()
		dst = append(dst, prior)
	}
}

// extra writes the other inputs of the hash: the adapter for every block, the salt for the first block.
func (e *encoder) extra(lora, salt string, first, tagged bool) {
	n := 0
	if lora != "" {
		n++
	}
	if salt != "" && first {
		n++
	}
	if n == 0 {
		e.none()
		return
	}
	e.tuple(n)
	if lora != "" {
		e.text(lora)
	}
	if salt != "" && first {
		if tagged {
			e.tuple(2)
			e.text("cache_salt")
		}
		e.text(salt)
		if tagged {
			e.close(2)
		}
	}
	e.close(n)
}

// encoder writes nested tuples of bytes, texts and numbers as Python's pickle (protocol 5, one frame, no repeated
// object) or as canonical CBOR (RFC 8949 §4.2.1). A tuple is opened before the elements and closed after them, with the
// number of elements both times.
type encoder struct {
	cbor bool
	buf  []byte
}

// frameHead is the length of a pickle's head: the protocol, and the frame with the length.
const frameHead = 11

func (e *encoder) begin() {
	e.buf = e.buf[:0]
	if !e.cbor {
		e.buf = append(e.buf, 0x80, 5, 0x95, 0, 0, 0, 0, 0, 0, 0, 0)
	}
}

// bytes ends the encoding and returns the bytes since begin.
func (e *encoder) bytes() []byte {
	if !e.cbor {
		e.buf = append(e.buf, '.')
		binary.LittleEndian.PutUint64(e.buf[3:], uint64(len(e.buf)-frameHead))
	}
	return e.buf
}

// head writes a CBOR head: a major type and a number.
func (e *encoder) head(major byte, n uint64) {
	switch {
	case n < 24:
		e.buf = append(e.buf, major<<5|byte(n))
	case n <= math.MaxUint8:
		e.buf = append(e.buf, major<<5|24, byte(n))
	case n <= math.MaxUint16:
		e.buf = binary.BigEndian.AppendUint16(append(e.buf, major<<5|25), uint16(n))
	default: // for tokens and for lengths of texts
		e.buf = binary.BigEndian.AppendUint32(append(e.buf, major<<5|26), uint32(n))
	}
}

func (e *encoder) none() {
	if e.cbor {
		e.buf = append(e.buf, 0xf6)
	} else {
		e.buf = append(e.buf, 'N')
	}
}

func (e *encoder) number(n uint32) {
	switch {
	case e.cbor:
		e.head(0, uint64(n))
	case n <= math.MaxUint8:
		e.buf = append(e.buf, 'K', byte(n))
	case n <= math.MaxUint16:
		e.buf = binary.LittleEndian.AppendUint16(append(e.buf, 'M'), uint16(n))
	case n <= math.MaxInt32:
		e.buf = binary.LittleEndian.AppendUint32(append(e.buf, 'J'), n)
	default: // LONG1 of five bytes; the last byte has the sign
		e.buf = append(binary.LittleEndian.AppendUint32(append(e.buf, 0x8a, 5), n), 0)
	}
}

func (e *encoder) binary(b []byte) { // at most 255 bytes
	if e.cbor {
		e.head(2, uint64(len(b)))
		e.buf = append(e.buf, b...)
		return
	}
	e.buf = append(append(append(e.buf, 'C', byte(len(b))), b...), memoize)
}

func (e *encoder) text(s string) {
	switch {
	case e.cbor:
		e.head(3, uint64(len(s)))
		e.buf = append(e.buf, s...)
		return
	case len(s) <= math.MaxUint8:
		e.buf = append(e.buf, 0x8c, byte(len(s)))
	default:
		e.buf = binary.LittleEndian.AppendUint32(append(e.buf, 'X'), uint32(len(s)))
	}
	e.buf = append(append(e.buf, s...), memoize)
}

// memoize is the pickle opcode after each object that could be repeated.
const memoize = 0x94

func (e *encoder) tuple(n int) {
	if e.cbor {
		e.head(4, uint64(n))
	} else if n > 3 {
		e.buf = append(e.buf, '(')
	}
}

func (e *encoder) close(n int) {
	if !e.cbor {
		e.buf = append(e.buf, [...]byte{')', 0x85, 0x86, 0x87, 't'}[min(n, 4)])
		if n > 0 {
			e.buf = append(e.buf, memoize)
		}
	}
}

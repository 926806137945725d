package recording

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Name is a keyed hash. 0 is no name.
type Name uint64

// SecretBytes is the length of the secret of a namespace.
const SecretBytes = 32

// Keys makes names from the secret of a namespace. It is safe for concurrent use.
type Keys struct {
	secret  []byte
	texts   cipher.Block // for ids of requests, sessions and adapters
	prompts sync.Map     // promptKey → cipher.Block
}

// promptKey selects the key for names of prompts. Blocks by engine hashes have names of their own.
type promptKey struct {
	model     string
	blockSize uint32
	engine    bool
}

// NewKeys returns the keys of a secret with [SecretBytes] bytes.
func NewKeys(secret []byte) (*Keys, error) {
	if len(secret) != SecretBytes {
		return nil, fmt.Errorf("the secret of the recording has %d bytes, not %d", len(secret), SecretBytes)
	}
	k := &Keys{secret: secret}
	var err error
	k.texts, err = k.derive("texts")
	return k, err
}

func (k *Keys) derive(purpose string) (cipher.Block, error) {
	key, err := hkdf.Key(sha256.New, k.secret, nil, "kvatlas recording 1: "+purpose, 16)
	if err != nil {
		return nil, err
	}
	return aes.NewCipher(key)
}

// promptKey returns the key for prompts of a model.
func (k *Keys) promptKey(p promptKey) cipher.Block {
	if c, ok := k.prompts.Load(p); ok {
		return c.(cipher.Block)
	}
	c, err := k.derive(fmt.Sprintf("prompts %t %d %s", p.engine, p.blockSize, p.model))
	if err != nil {
		panic("recording: " + err.Error()) // AES-128 accepts every key of 16 bytes
	}
	k.prompts.Store(p, c)
	return c
}

// Kinds of texts, which separate equal texts of different meaning.
const (
	requestText = 1 + iota
	sessionText
	adapterText
)

// block is the input and the output of AES. It is allocated once for each scratch.
type block [aes.BlockSize]byte

func (b *block) name(c cipher.Block) Name {
	c.Encrypt(b[:], b[:])
	if n := Name(binary.LittleEndian.Uint64(b[:])); n != 0 {
		return n
	}
	return 1
}

// text returns the name of a text in a space; 0 for the empty text.
func (k *Keys) text(b *block, kind uint64, text, salt string) Name {
	if text == "" {
		return 0
	}
	h := xxh3.HashString128(text)
	lo, hi := h.Lo+kind, h.Hi
	if salt != "" {
		s := xxh3.HashString128Seed(salt, kind)
		lo, hi = lo^s.Lo, hi^s.Hi
	}
	binary.LittleEndian.PutUint64(b[:8], lo)
	binary.LittleEndian.PutUint64(b[8:], hi)
	return b.name(k.texts)
}

// SpanOf returns the tokens of a name: the greatest multiple of the block size of at most want tokens, or one block.
func SpanOf(want, blockSize uint32) uint32 { return max(1, want/blockSize) * blockSize }

// prompt appends the names of a prompt to dst: one for each span of blocks, and one for the whole blocks of the rest.
// Tokens after the last whole block have no name, because no hash covers them.
func (k *Keys) prompt(dst []Name, b *block, r *Request, seq []events.SeqHash) []Name {
	c := k.promptKey(promptKey{r.Model, r.BlockSize, r.EngineHashes})
	per := int(r.Span / r.BlockSize)
	for from := 0; from < len(seq); from += per {
		binary.LittleEndian.PutUint64(b[:8], uint64(seq[min(from+per, len(seq))-1]))
		clear(b[8:])
		dst = append(dst, b.name(c))
	}
	return dst
}

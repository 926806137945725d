package events

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/zeebo/xxh3"
)

func count(from, n uint32) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = from + uint32(i)
	}
	return tokens
}

func mustHasher(t testing.TB, blockSize uint32, space Space, eagle bool) *Hasher {
	t.Helper()
	h, err := NewHasher(blockSize, space)
	if eagle {
		h, err = NewLookaheadHasher(blockSize, 1, space)
	}
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// Dynamo's own compute_block_hash_for_seq (ai-dynamo-runtime 1.6.1) computed the vectors.
func TestLocalHashVectors(t *testing.T) {
	repeat := func(id uint32, n int) []uint32 {
		tokens := make([]uint32, n)
		for i := range tokens {
			tokens[i] = id
		}
		return tokens
	}
	const pad = 49115154 // some routers' token for an item's placeholders
	for _, c := range []struct {
		name   string
		tokens []uint32
		size   uint32
		space  Space
		eagle  bool
		media  [][]BlockMedia
		want   []LocalHash
	}{
		{name: "plain", tokens: count(0, 12), size: 4, want: []LocalHash{9143094415614847814, 12124091508212882195,
			1088361764653601668}},
		{name: "tail is ignored", tokens: count(0, 15), size: 4, want: []LocalHash{9143094415614847814,
			12124091508212882195, 1088361764653601668}},
		{name: "less than a block", tokens: count(0, 3), size: 4},
		{name: "nothing", size: 4},
		{name: "LoRA", tokens: count(0, 4), size: 4, space: Space{LoRA: "adapter-a"},
			want: []LocalHash{6665157333201000639}},
		{name: "salt", tokens: count(0, 4), size: 4, space: Space{Salt: "tenant-a"},
			want: []LocalHash{17009624042690211646}},
		{name: "LoRA and salt", tokens: count(0, 4), size: 4, space: Space{LoRA: "adapter-a", Salt: "tenant-a"},
			want: []LocalHash{8269515957840517240}},
		{name: "media at no place", tokens: count(0, 2), size: 2, media: [][]BlockMedia{{{42, NoOffset}}},
			want: []LocalHash{6100948656312251355}},
		{name: "EAGLE", tokens: count(0, 6), size: 2, eagle: true, want: []LocalHash{11646242937812223497,
			9948816348502404300}},
		{name: "EAGLE, nothing", size: 2, eagle: true},
		{name: "size 2", tokens: count(0, 6), size: 2, want: []LocalHash{10918435022357402928, 10731123482949079648,
			12189426826560619506}},
		{name: "size 16 from 0", tokens: count(0, 16), size: 16, want: []LocalHash{15310707395893867146}},
		{name: "size 16 from 1", tokens: count(1, 16), size: 16, want: []LocalHash{16863443419780771464}},
		{name: "size 64", tokens: count(0, 64), size: 64, want: []LocalHash{3480597578098033343}},
		{name: "128 times 0", tokens: repeat(0, 128), size: 128, want: []LocalHash{9536694438970776937}},
		{name: "128 times 1", tokens: repeat(1, 128), size: 128, want: []LocalHash{4136650367586629977}},
		{name: "512 times 0", tokens: repeat(0, 512), size: 512, want: []LocalHash{16456450638077811066}},
		{name: "pad token", tokens: []uint32{10, 20, pad, pad}, size: 4, want: []LocalHash{71881790567603244}},
	} {
		h := mustHasher(t, c.size, c.space, c.eagle)
		if got := h.HashMedia(nil, c.tokens, c.media); !slices.Equal(got, c.want) {
			t.Errorf("%s: HashMedia = %d, want %d", c.name, got, c.want)
		}
		if c.media != nil {
			continue
		}
		if got := h.Hash(nil, c.tokens); !slices.Equal(got, c.want) {
			t.Errorf("%s: Hash = %d, want %d", c.name, got, c.want)
		}
		if got := h.blocks(len(c.tokens)); got != len(c.want) {
			t.Errorf("%s: Blocks = %d, want %d", c.name, got, len(c.want))
		}
	}
}

func TestSeedVectors(t *testing.T) {
	for _, c := range []struct {
		space Space
		want  uint64
	}{
		{Space{}, 1337},
		{Space{LoRA: "adapter-a"}, 8842669519798868182},
		{Space{Salt: "tenant-a"}, 1948188790972764086},
		{Space{LoRA: "adapter-a", Salt: "tenant-a"}, 10790858310771630931},
	} {
		if got := c.space.seed(); got != c.want {
			t.Errorf("seed of %+v = %d, want %d", c.space, got, c.want)
		}
	}
	if got := xxh3.HashSeed([]byte("test data"), baseSeed); got != 13226331709069118873 {
		t.Errorf("hash of upstream's test data = %d", got)
	}
}

func TestSeqHashVectors(t *testing.T) {
	locals := mustHasher(t, 4, Space{}, false).Hash(nil, count(0, 12))
	if got, want := SeqHashes(nil, locals), []SeqHash{9143094415614847814, 9510318385840434533,
		16998148715716822651}; !slices.Equal(got, want) {
		t.Errorf("seq hashes = %d, want %d", got, want)
	}
	if got, want := SeqHashes([]SeqHash{7}, []LocalHash{11, 22, 33}), []SeqHash{7, 11, 750553365844651409,
		3257565445809651757}; !slices.Equal(got, want) {
		t.Errorf("seq hashes = %d, want %d", got, want)
	}
	if got := SeqHashes(nil, nil); got != nil {
		t.Errorf("seq hashes of nothing = %d", got)
	}
}

// TestSeqHashAsLibrary compares nextSeqHash with the library.
func TestSeqHashAsLibrary(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 10_000 {
		seq, local := SeqHash(rng.Uint64()), LocalHash(rng.Uint64()>>rng.IntN(64))
		pair := binary.LittleEndian.AppendUint64(nil, uint64(seq))
		pair = binary.LittleEndian.AppendUint64(pair, uint64(local))
		if got, want := nextSeqHash(seq, local), SeqHash(xxh3.HashSeed(pair, baseSeed)); got != want {
			t.Fatalf("%x, %x: %x, want %x", seq, local, got, want)
		}
	}
}

// TestHashItems: an item belongs to a block if any of the item's tokens is hashed with the block.
func TestHashItems(t *testing.T) {
	rng := rand.New(rand.NewPCG(16, 1))
	for range 300 {
		size, lookahead := 1+rng.Uint32N(8), rng.Uint32N(12)
		h, err := NewLookaheadHasher(size, lookahead, Space{})
		if err != nil {
			t.Fatal(err)
		}
		tokens := count(1, rng.Uint32N(100))
		var items []MediaItem
		for at := rng.IntN(20); at < len(tokens); at += rng.IntN(20) {
			length := 1 + rng.IntN(min(30, len(tokens)-at))
			items = append(items, MediaItem{Hash: rng.Uint64N(3), Offset: uint32(at), Length: uint32(length)})
			at += length
		}
		var media [][]BlockMedia
		for begin := 0; begin < len(tokens); begin += int(size) {
			var touching []BlockMedia
			for _, item := range items {
				for at := item.Offset; at < item.Offset+item.Length; at++ {
					if int(at) >= begin && int(at) < begin+int(size+lookahead) {
						touching = append(touching, BlockMedia{item.Hash, int64(item.Offset) - int64(begin)})
						break
					}
				}
			}
			media = append(media, touching)
		}
		got, want := h.HashItems(nil, tokens, items), h.HashMedia(nil, tokens, media)
		if !slices.Equal(got, want) {
			t.Fatalf("blocks of %d and %d ahead, %d tokens, %v: %v, want %v", size, lookahead, len(tokens), items, got, want)
		}
	}
}

func TestMediaHash(t *testing.T) {
	const digest = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"
	if got := dynamoMediaHash([]byte(digest)); got != 0xcf97adeedb59e05b {
		t.Errorf("of a digest, Dynamo's: %x", got)
	}
	if got := MediaHash(digest); got != xxh3.HashString(digest) {
		t.Errorf("of a digest: %x", got)
	}
	for _, s := range []string{"", "image-1", digest[:63] + "g", digest[:63], digest + "0"} {
		if ours, dynamo := MediaHash(s), dynamoMediaHash([]byte(s)); ours != xxh3.HashString(s) || dynamo != ours {
			t.Errorf("of %q: %x, Dynamo's %x", s, ours, dynamo)
		}
	}
}

// Hashing in place equals portable hashing.
func TestHashTokensTwin(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var scratch blockScratch
	for range 2000 {
		tokens := make([]uint32, r.IntN(700))
		for i := range tokens {
			tokens[i] = r.Uint32() >> r.IntN(32)
		}
		seed := r.Uint64()
		if got, want := hashTokens(tokens, seed), scratch.hash(tokens, nil, seed); got != want {
			t.Fatalf("%d tokens: %x in place, %x put together", len(tokens), got, want)
		}
	}
}

func TestNewHasherRefusesSizes(t *testing.T) {
	for _, size := range []uint32{0, MaxBlockSize + 1} {
		if _, err := NewHasher(size, Space{}); err == nil {
			t.Errorf("a hasher for blocks of %d tokens", size)
		}
		if _, err := NewLookaheadHasher(size, 1, Space{}); err == nil {
			t.Errorf("a hasher that reads ahead, for blocks of %d tokens", size)
		}
	}
}

// The hash of a block with lookahead equals the hash of a longer block.
func TestLookahead(t *testing.T) {
	if _, err := NewLookaheadHasher(4, MaxBlockSize+1, Space{}); err == nil {
		t.Error("a hasher that reads ahead beyond all bounds")
	}
	space := Space{Salt: "tenant-a"}
	for ahead := range uint32(5) {
		h, err := NewLookaheadHasher(4, ahead, space)
		if err != nil {
			t.Fatal(err)
		}
		for n := range uint32(30) {
			tokens := count(7, n)
			var want []LocalHash
			for at := uint32(0); at+4+ahead <= n; at += 4 {
				want = append(want, mustHasher(t, 4+ahead, space, false).Hash(nil, tokens[at:at+4+ahead])...)
			}
			if got := h.Hash(nil, tokens); !slices.Equal(got, want) || h.blocks(len(tokens)) != len(want) {
				t.Fatalf("%d tokens, %d ahead: %x, want %x", n, ahead, got, want)
			}
		}
	}
}

func TestHashDoesNotAllocate(t *testing.T) {
	for _, size := range []uint32{1, 16, 64, 512} {
		h := mustHasher(t, size, Space{LoRA: "adapter-a"}, false)
		tokens := count(0, 4096)
		dst := make([]LocalHash, 0, 4096)
		seqs := make([]SeqHash, 0, 4096)
		if n := testing.AllocsPerRun(100, func() {
			seqs = SeqHashes(seqs[:0], h.Hash(dst, tokens))
		}); n != 0 {
			t.Errorf("block size %d: %v allocations", size, n)
		}
	}
}

// TestHashSixteens compares blocks of 16 tokens with the library's hash of their bytes.
func TestHashSixteens(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 16))
	for range 2000 {
		tokens := make([]uint32, rng.IntN(200))
		for i := range tokens {
			tokens[i] = rng.Uint32() >> rng.IntN(32)
		}
		space := Space{LoRA: []string{"", "a"}[rng.IntN(2)], Salt: []string{"", "b"}[rng.IntN(2)]}
		h, err := NewHasher(16, space)
		if err != nil {
			t.Fatal(err)
		}
		want := []LocalHash{7}
		for i := 0; i+16 <= len(tokens); i += 16 {
			var block []byte
			for _, v := range tokens[i : i+16] {
				block = binary.LittleEndian.AppendUint32(block, v)
			}
			want = append(want, LocalHash(xxh3.HashSeed(block, space.seed())))
		}
		if got := h.Hash([]LocalHash{7}, tokens); !slices.Equal(got, want) {
			t.Fatalf("%v in %+v: %x, want %x", tokens, space, got, want)
		}
	}
}

func BenchmarkHash(b *testing.B) {
	for _, size := range []uint32{16, 64, 512} {
		b.Run(fmt.Sprintf("block=%d", size), func(b *testing.B) {
			h := mustHasher(b, size, Space{}, false)
			tokens := count(0, 12288)
			dst := make([]LocalHash, 0, len(tokens)/int(size))
			b.SetBytes(int64(4 * len(tokens)))
			b.ReportAllocs()
			for b.Loop() {
				h.Hash(dst, tokens)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(cap(dst)), "ns/block")
		})
	}
}

func BenchmarkSeqHashes(b *testing.B) {
	locals := mustHasher(b, 16, Space{}, false).Hash(nil, count(0, 12288))
	dst := make([]SeqHash, 0, len(locals))
	b.ReportAllocs()
	for b.Loop() {
		SeqHashes(dst, locals)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(locals)), "ns/block")
}

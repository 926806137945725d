package hicache

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
)

// golden has results of SGLang's own code; testdata/README.md describes the command.
type golden struct {
	Pages []struct {
		Tokens   []uint32 `json:"tokens"`
		Page     int      `json:"page"`
		Eagle    bool     `json:"eagle"`
		ExtraKey *string  `json:"extra_key"`
		Salt     *string  `json:"salt"`
		Hashes   []string `json:"hashes"`
	} `json:"pages"`
	Keys []struct {
		Config SGLang   `json:"config"`
		Hash   string   `json:"hash"`
		Keys   []string `json:"keys"`
	} `json:"keys"`
}

func readGolden(t testing.TB) (g golden) {
	b, err := os.ReadFile("testdata/sglang.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &g); err != nil {
		t.Fatal(err)
	}
	if len(g.Pages) == 0 || len(g.Keys) == 0 {
		t.Fatal("testdata/sglang.json is empty")
	}
	return g
}

func TestGoldenPageHashes(t *testing.T) {
	for i, q := range readGolden(t).Pages {
		c := SGLang{PageSize: q.Page, IsEagle: q.Eagle}
		var got []string
		for _, h := range c.PageHashes(nil, q.Tokens, Space{ExtraKey: q.ExtraKey, CacheSalt: q.Salt}) {
			got = append(got, h.String())
		}
		if !slices.Equal(got, q.Hashes) {
			t.Errorf("%d: %v, want %v", i, got, q.Hashes)
		}
	}
}

func TestGoldenKeys(t *testing.T) {
	for i, q := range readGolden(t).Keys {
		var page PageHash
		for j := range page {
			page[j] = byte(j)
		}
		if page.String() != q.Hash {
			t.Fatalf("the golden page is %s", q.Hash)
		}
		if err := (&Config{SGLang: &q.Config}).Check(); err != nil {
			t.Fatal(err)
		}
		if got := q.Config.Keys([]PageHash{page}).Keys; !slices.Equal(got, q.Keys) {
			t.Errorf("%d: %v, want %v", i, got, q.Keys)
		}
	}
}

func TestPlainMLAKeys(t *testing.T) {
	c := SGLang{PPSize: 1, IsMLA: true, MLAKeyStyle: "plain"}
	if got := c.Keys(make([]PageHash, 1)).Keys[0]; got != strings.Repeat("00", 32)+"_k" {
		t.Error(got)
	}
}

// wouldLoad returns the loads of a controller that queries the store batch by batch after the first have pages.
func wouldLoad(c *SGLang, pages []bool, have int) (there, would int) {
	const batch = 128
	for at := have; at < len(pages); at += batch {
		asked := pages[at:min(at+batch, len(pages))]
		if n := slices.Index(asked, false); n >= 0 {
			there += n
			break
		}
		there += len(asked)
	}
	would = there
	if c.PrefetchCapacity > 0 {
		would = min(would, c.PrefetchCapacity/c.PageSize)
	}
	threshold := 256
	if c.PrefetchThreshold > 0 {
		threshold = c.PrefetchThreshold
	}
	if would*c.PageSize < max(threshold, c.PageSize) {
		would = 0
	}
	return there, would
}

func prompt(pages, size int) []uint32 {
	rng := rand.New(rand.NewPCG(3, 4))
	tokens := make([]uint32, pages*size)
	for i := range tokens {
		tokens[i] = rng.Uint32N(151936)
	}
	return tokens
}

func BenchmarkSGLang4096Pages(b *testing.B) {
	c := SGLang{PageSize: 64, TPSize: 8, PPSize: 1}
	tokens := prompt(4096, 64)
	b.Run("hashes and keys", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			c.Keys(c.PageHashes(make([]PageHash, 0, 4096), tokens, Space{}))
		}
	})
	b.Run("hashes and keys by runs", func(b *testing.B) { // as a continued question requests them
		b.ReportAllocs()
		for b.Loop() {
			l := onlyLane(&c, tokens, Space{})
			for at := 0; at < l.Pages; at = runEnd(at) {
				l.Names(at, min(runEnd(at), l.Pages))
			}
		}
	})
	b.Run("hashes", func(b *testing.B) {
		dst := make([]PageHash, 0, 4096)
		b.ReportAllocs()
		for b.Loop() {
			c.PageHashes(dst, tokens, Space{})
		}
	})
	b.Run("SHA-256 alone", func(b *testing.B) {
		page := make([]byte, 32+4*64)
		b.ReportAllocs()
		for b.Loop() {
			for i := range 4096 {
				binary.LittleEndian.PutUint32(page, uint32(i))
				sha256.Sum256(page)
			}
		}
	})
}

package hicache

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// PageHash is SGLang's name of a page: the SHA-256 of the previous page's hash and the page's tokens.
type PageHash [sha256.Size]byte

func (h PageHash) String() string { return hex.EncodeToString(h[:]) }

// Space has the inputs of a page hash besides the tokens. nil means unset, which differs from empty.
type Space struct {
	ExtraKey  *string
	CacheSalt *string
}

// seed returns the input before the first page, or nil (sgl-project/sglang › srt/mem_cache/utils.py,
// storage_namespace_seed).
func (s Space) seed() []byte {
	if s.ExtraKey == nil && s.CacheSalt == nil {
		return nil
	}
	text := []byte("sglang-cache-namespace-v1")
	for _, part := range []*string{s.ExtraKey, s.CacheSalt} {
		if part == nil {
			text = append(text, 0)
			continue
		}
		text = append(text, 1)
		text = binary.LittleEndian.AppendUint64(text, uint64(len(*part)))
		text = append(text, *part...)
	}
	sum := sha256.Sum256(text)
	return sum[:]
}

// pages returns the number of whole pages in a prompt.
func (s *SGLang) pages(tokens int) int {
	if s.IsEagle {
		tokens = max(0, tokens-1)
	}
	return tokens / s.PageSize
}

// lanes returns a prompt's pages for a cache: a lane of the objects that each page needs, unless free, and a lane for
// each trailing pool. The caller must not change tokens while the lanes are in use. s must have passed Check.
func (s *SGLang) lanes(tokens []uint32, space Space) (lanes []Lane, trailing []Pool, free bool) {
	suffixes, trailing, free := s.objects()
	count := s.pages(len(tokens))
	m := fingerprinter{pageSize: s.PageSize}
	if s.IsEagle {
		m.ahead = 1
	}
	if !s.namespacesIgnored() {
		m.space = space.seed()
	}
	fingerprints := m.append(make([]fingerprint, 0, runOf(count)+1), tokens, count)
	var pages []PageHash // computed hashes
	add := func(names func(pages []PageHash) PageKeys) {
		lanes = append(lanes, Lane{ID: uint64(len(lanes)), Pages: count, fingerprints: fingerprints,
			Names: func(from, to int) PageKeys {
				if len(pages) < to {
					pages = s.PageHashes(pages, tokens[:min(len(tokens), to*s.PageSize+1)], space)
				}
				return names(pages[from:to])
			}})
	}
	switch {
	case s.Backend == fileBackend:
		add(s.FileKeys)
	case !free:
		add(func(pages []PageHash) PageKeys { return s.keys(pages, suffixes) })
	}
	for _, p := range trailing {
		add(func(pages []PageHash) PageKeys { return s.keys(pages, p.Suffixes) })
	}
	return lanes, trailing, free
}

// PageHashes appends the hashes of the whole pages of tokens to dst. dst has the hashes of the first pages, or none.
// Tokens after the last whole page have no hash. With EAGLE, a page consists of pairs (t, t+1), so n tokens have
// (n-1)/page_size pages. s must have passed Check.
func (s *SGLang) PageHashes(dst []PageHash, tokens []uint32, space Space) []PageHash {
	width := 1
	if s.IsEagle {
		width = 2
	}
	buf := make([]byte, sha256.Size+4*s.PageSize*width) // hash of the previous page, or the seed, and a page
	text := buf[sha256.Size:]
	if done := len(dst); done > 0 {
		copy(buf, dst[done-1][:])
		text = buf
	} else if !s.namespacesIgnored() {
		if seed := space.seed(); seed != nil {
			copy(buf, seed)
			text = buf
		}
	}
	count := s.pages(len(tokens))
	dst = slices.Grow(dst, max(0, count-len(dst)))
	for first := len(dst) * s.PageSize; first < count*s.PageSize; first += s.PageSize {
		at := sha256.Size
		for i := first; i < first+s.PageSize; i++ {
			for j := range width {
				binary.LittleEndian.PutUint32(buf[at:], tokens[i+j])
				at += 4
			}
		}
		sum := sha256.Sum256(text)
		dst = append(dst, sum)
		copy(buf, sum[:])
		text = buf
	}
	return dst
}

// splitRanks returns the number of head shares with a key, per pipeline rank.
func (s *SGLang) splitRanks() int {
	if s.ShouldSplitHeads {
		return max(s.TPLCMSize, s.TPSize, 1)
	}
	return max(s.TPSize, 1)
}

func (s *SGLang) keysPerPage() int {
	if s.IsMLA {
		return max(s.PPSize, 1)
	}
	return 2 * s.splitRanks() * max(s.PPSize, 1)
}

// suffixes returns the suffixes of a page's keys, for the objects of keys and values. Pipeline ranks are outermost,
// then tensor ranks, then k and v.
func (s *SGLang) suffixes() []string {
	var all []string
	for pp := range max(s.PPSize, 1) {
		stage := ""
		if s.PPSize > 1 {
			stage = "_" + strconv.Itoa(pp)
		}
		if s.IsMLA {
			if stage == "" && !s.plainStyle() {
				stage = "_"
			}
			all = append(all, stage+"_k")
			continue
		}
		for rank := range s.splitRanks() {
			mid := "_" + strconv.Itoa(rank) + stage
			all = append(all, mid+"_k", mid+"_v")
		}
	}
	return all
}

// PageKeys has the names of objects, a fixed number per page. A page is a hit only if all of its keys exist.
type PageKeys struct {
	Keys    []string // page by page
	PerPage int
}

// Keys returns the names of the pages' objects in a Mooncake store, without the pools of which only the last pages
// matter. s must have passed Check.
func (s *SGLang) Keys(pages []PageHash) PageKeys {
	suffixes, _, _ := s.objects()
	return s.keys(pages, suffixes)
}

// keys returns the names of the pages' objects with the given suffixes.
func (s *SGLang) keys(pages []PageHash, suffixes []string) PageKeys {
	prefix := s.keyPrefix()
	if prefix != "" {
		prefix += "_"
	}
	return pageKeys(prefix, pages, suffixes)
}

// FileKeys returns the names of the pages' files in the folder of the file backend. s must have passed Check.
func (s *SGLang) FileKeys(pages []PageHash) PageKeys {
	model := strings.ReplaceAll(s.ModelName, "/", "-")
	var ends []string
	for pp := range s.PPSize {
		pipeline := ""
		if s.PPSize > 1 {
			pipeline = fmt.Sprintf("_%d_%d", s.PPSize, pp)
		}
		if s.IsMLA {
			ends = append(ends, "_"+model+pipeline)
			continue
		}
		for tp := range s.TPSize {
			ends = append(ends, fmt.Sprintf("_%s_%d_%d%s", model, tp, s.TPSize, pipeline))
		}
	}
	return pageKeys("", pages, ends)
}

// pageKeys joins a tag, a page's hash and each of the suffixes.
func pageKeys(tag string, pages []PageHash, suffixes []string) PageKeys {
	keys := make([]string, 0, len(pages)*len(suffixes))
	size := 0 // size of a page's keys
	for _, end := range suffixes {
		size += len(tag) + hex.EncodedLen(sha256.Size) + len(end)
	}
	const together = 64 << 10 // bytes per allocation: enough for a run's keys, and less than a long prompt's
	step := max(1, together/max(1, size))
	text := make([]byte, 0, min(step, len(pages))*size)
	for len(pages) > 0 {
		n := min(step, len(pages))
		text = text[:0]
		for i := range n {
			for _, end := range suffixes {
				text = append(hex.AppendEncode(append(text, tag...), pages[i][:]), end...)
			}
		}
		all, at := string(text), 0
		for range n {
			for _, end := range suffixes {
				length := len(tag) + hex.EncodedLen(sha256.Size) + len(end)
				keys = append(keys, all[at:at+length])
				at += length
			}
		}
		pages = pages[n:]
	}
	return PageKeys{Keys: keys, PerPage: len(suffixes)}
}

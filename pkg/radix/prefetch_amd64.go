package radix

// prefetchHomes prefetches the homes of n hashes in a table with the given number of buckets.
//
//go:noescape
func prefetchHomes(slots *uint64, buckets uint64, hashes *uint64, n int)

// prefetch prefetches the homes of hashes in the table.
func (t *names) prefetch(hashes []uint64) {
	if t.size > 0 && len(hashes) > 0 {
		prefetchHomes(&t.slots.s[0], t.size/bucket, &hashes[0], len(hashes))
	}
}

// prefetchWords prefetches n consecutive words.
//
//go:noescape
func prefetchWords(p *uint64, n int)

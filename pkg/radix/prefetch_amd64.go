package radix

// prefetchHomes asks for the homes of n hashes in a table of so many buckets, and does not wait for them.
//
//go:noescape
func prefetchHomes(slots *uint64, buckets uint64, hashes *uint64, n int)

// prefetch asks for the homes of hashes in the table.
func (t *names) prefetch(hashes []uint64) {
	if t.size > 0 && len(hashes) > 0 {
		prefetchHomes(&t.slots.s[0], t.size/bucket, &hashes[0], len(hashes))
	}
}

// prefetchWords asks for n words in a row, and does not wait for them.
//
//go:noescape
func prefetchWords(p *uint64, n int)

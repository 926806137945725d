package radix

// visit reads the places of hashes in the table, on processors without a prefetch instruction.
//
//go:noinline
func (t *names) visit(hashes []uint64) (sum uint64) {
	if t.size == 0 {
		return 0
	}
	for _, h := range hashes {
		sum += t.slots.s[t.home(h)]
	}
	return sum
}

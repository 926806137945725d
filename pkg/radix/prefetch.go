package radix

// visit reads the places of hashes in the table, where there is no instruction that asks for them.
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

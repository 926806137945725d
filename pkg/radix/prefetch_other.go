//go:build !amd64

package radix

// ask visits the places of hashes in the table, so that the processor fetches them together.
func (t *names) ask(hashes []uint64) {
	if t.size > 0 {
		t.visit(hashes)
	}
}

//go:noinline
func (t *names) visit(hashes []uint64) (sum uint64) {
	for _, h := range hashes {
		sum += t.slots.s[t.home(h)]
	}
	return sum
}

func prefetchWords(*uint64, int) {}

//go:build !amd64

package radix

// prefetch reads the homes of hashes in the table, so that the processor loads them together.
func (t *names) prefetch(hashes []uint64) { t.visit(hashes) }

func prefetchWords(*uint64, int) {}

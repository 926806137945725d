//go:build !race

package radix

import "golang.org/x/sys/unix"

const mapFlags = unix.MAP_NORESERVE

// adviseHuge asks for huge pages: what an index does is random visits, and with small pages most of them miss the TLB too.
func adviseHuge(region []byte) { _ = unix.Madvise(region, unix.MADV_HUGEPAGE) }

package corpus

import "golang.org/x/sys/unix"

// adviseHuge requests huge pages. Without huge pages the program is only slower.
func adviseHuge(region []byte) { _ = unix.Madvise(region, unix.MADV_HUGEPAGE) }

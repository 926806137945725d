package corpus

import "golang.org/x/sys/unix"

// adviseHuge asks for huge pages. Where there are none, nothing is lost but time.
func adviseHuge(region []byte) { _ = unix.Madvise(region, unix.MADV_HUGEPAGE) }

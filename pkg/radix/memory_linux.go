package radix

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

const mapFlags = unix.MAP_NORESERVE

// adviseHuge requests huge pages. An index visits memory at random, and most visits of small pages also miss the TLB.
func adviseHuge(region []byte) { _ = unix.Madvise(region, unix.MADV_HUGEPAGE) }

// touchMemory makes the system provide the pages of a part of a mapping, without a change of their content. It starts
// at the end of the part, like a table that grows in place. Any goroutine may call it while the mapping exists. Before
// Linux 5.14, it does nothing.
func touchMemory(part []byte) {
	page := uintptr(unix.Getpagesize())
	part = part[min(len(part), int(-uintptr(unsafe.Pointer(unsafe.SliceData(part)))%page)):]
	for len(part) > 0 { // in steps, because each step blocks mmap and munmap
		from := (len(part) - 1) / hugePage * hugePage
		if unix.Madvise(part[from:], unix.MADV_POPULATE_WRITE) != nil {
			return
		}
		part = part[:from]
	}
}

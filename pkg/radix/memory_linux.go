package radix

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

const mapFlags = unix.MAP_NORESERVE

// adviseHuge asks for huge pages: what an index does is random visits, and with small pages most of them miss the TLB
// too.
func adviseHuge(region []byte) { _ = unix.Madvise(region, unix.MADV_HUGEPAGE) }

// touchMemory has the system provide the pages of a part of a mapping, and changes nothing that stands there. It begins
// at the part's end, as a table does that grows in place. Any goroutine may call it while the mapping is there. Systems
// older than Linux 5.14 leave it to the first who comes.
func touchMemory(part []byte) {
	page := uintptr(unix.Getpagesize())
	part = part[min(len(part), int(-uintptr(unsafe.Pointer(unsafe.SliceData(part)))%page)):]
	for len(part) > 0 { // in steps, for nobody can unmap or map in the meantime
		from := (len(part) - 1) / hugePage * hugePage
		if unix.Madvise(part[from:], unix.MADV_POPULATE_WRITE) != nil {
			return
		}
		part = part[:from]
	}
}

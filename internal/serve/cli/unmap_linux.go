package cli

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// unmapProgram unmaps the pages of the program's file: code and constants. The kernel keeps the pages in its cache and
// maps a page again at its next use. A failure has no effect. DESIGN.md lists the pages that must stay.
func unmapProgram() {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return
	}
	maps, err := os.Open("/proc/self/smaps")
	if err != nil {
		return
	}
	defer maps.Close()
	for _, m := range filePages(maps, program) {
		_, _, _ = unix.Syscall(unix.SYS_MADVISE, m.from, m.size, unix.MADV_DONTNEED)
	}
}

// mapping is a range of addresses.
type mapping struct{ from, size uintptr }

// filePages parses smaps of proc(5) and returns the mappings with the unchanged content of the program's file: their
// pages are read-only, and no page was written.
func filePages(smaps io.Reader, program string) (all []mapping) {
	var m mapping
	ok := false
	for lines := bufio.NewScanner(smaps); lines.Scan(); {
		line := lines.Text()
		var from, to uintptr
		var mode string
		if n, _ := fmt.Sscanf(line, "%x-%x %s", &from, &to, &mode); n == 3 {
			m = mapping{from, to - from}
			ok = to > from && (mode == "r-xp" || mode == "r--p") && strings.HasSuffix(line, " "+program)
			continue
		}
		if rest, is := strings.CutPrefix(line, "Anonymous:"); is && ok && strings.TrimSpace(rest) == "0 kB" {
			all = append(all, m)
		}
	}
	return all
}

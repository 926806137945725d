package cli

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// unmapProgram unmaps the pages of the program's file: code and constants. The kernel keeps them in its cache and maps
// each page again at its next use. A failure changes nothing.
func unmapProgram() {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return
	}
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return
	}
	defer maps.Close()
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		if from, size, ok := constant(lines.Text(), program); ok {
			_, _, _ = unix.Syscall(unix.SYS_MADVISE, from, size, unix.MADV_DONTNEED)
		}
	}
}

// constant reads a line of /proc/self/maps. ok is true for pages of the program's file that cannot be written: the
// process would lose others.
func constant(line, program string) (from, size uintptr, ok bool) {
	var to uintptr
	var mode string
	if n, _ := fmt.Sscanf(line, "%x-%x %s", &from, &to, &mode); n != 3 || to <= from {
		return 0, 0, false
	}
	return from, to - from, (mode == "r-xp" || mode == "r--p") && strings.HasSuffix(line, " "+program)
}

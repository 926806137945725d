package cli

import (
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFilePages: writable pages, written pages, and pages of other files are not unmapped.
func TestFilePages(t *testing.T) {
	const program = "/usr/bin/indexer"
	smaps := ""
	for _, m := range []struct{ head, anonymous string }{
		{"00400000-0172c000 r-xp 00000000 fe:00 9989254                            /usr/bin/indexer", "0"},
		{"0172c000-02bfa000 r--p 0132c000 fe:00 9989254                            /usr/bin/indexer", "0"},
		{"02bfa000-02cf5000 r--p 027fa000 fe:00 9989254                            /usr/bin/indexer", "1004"}, // relocated
		{"02cf5000-02cf9000 rw-p 027fa000 fe:00 9989254                            /usr/bin/indexer", "0"},
		{"03000000-03001000 r--s 0132c000 fe:00 9989254                            /usr/bin/indexer", "0"},
		{"03100000-03101000 r--p 0132c000 fe:00 9989254                            /lib/indexer", "0"},
		{"03200000-03201000 r--p 0132c000 fe:00 9989254                            /usr/bin/indexer2", "0"},
		{"7f74a8000000-7f84a8000000 r--p 00000000 00:00 0 ", "0"},
	} {
		smaps += m.head + "\nSize:              19640 kB\nRss:                3680 kB\nAnonymous:         " + m.anonymous +
			" kB\nVmFlags: rd ex mr mw me sd\n"
	}
	want := []mapping{{0x400000, 0x132c000}, {0x172c000, 0x14ce000}}
	if got := filePages(strings.NewReader(smaps), program); !slices.Equal(got, want) {
		t.Errorf("%x, want %x", got, want)
	}
}

// TestUnmapProgram maps the program once more, writes to the pages, and makes them constant, as a loader does that
// relocates a program (go build -buildmode=pie). They keep what was written.
func TestUnmapProgram(t *testing.T) {
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	pages, err := unix.Mmap(int(program.Fd()), 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(pages)
	relocated := ^pages[100]
	pages[100] = relocated
	if err := unix.Mprotect(pages, unix.PROT_READ); err != nil {
		t.Fatal(err)
	}
	unmapProgram()
	if pages[100] != relocated {
		t.Error("unmapProgram has undone a relocation")
	}
}

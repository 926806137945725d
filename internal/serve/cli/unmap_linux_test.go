package cli

import "testing"

// TestConstant: pages that can be written, or belong to another file, stay.
func TestConstant(t *testing.T) {
	const program = "/usr/bin/indexer"
	for line, want := range map[string]uintptr{
		"00400000-0172c000 r-xp 00000000 fe:00 9989254                            /usr/bin/indexer":  0x132c000,
		"0172c000-02bfa000 r--p 0132c000 fe:00 9989254                            /usr/bin/indexer":  0x14ce000,
		"02bfa000-02cf5000 rw-p 027fa000 fe:00 9989254                            /usr/bin/indexer":  0,
		"0172c000-02bfa000 r--s 0132c000 fe:00 9989254                            /usr/bin/indexer":  0,
		"0172c000-02bfa000 r--p 0132c000 fe:00 9989254                            /lib/indexer":      0,
		"0172c000-02bfa000 r--p 0132c000 fe:00 9989254                            /usr/bin/indexer2": 0,
		"7f74a8000000-7f84a8000000 r--p 00000000 00:00 0 ":                                           0,
		"": 0,
	} {
		if _, size, ok := constant(line, program); ok != (want != 0) || ok && size != want {
			t.Errorf("%q: %x, %v; want %x", line, size, ok, want)
		}
	}
	unmapProgram() // the process goes on
}

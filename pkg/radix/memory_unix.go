//go:build unix

package radix

import "golang.org/x/sys/unix"

// reserveMemory reserves address space. A page uses memory only after the first touch. If the system refuses, it
// reserves less, down to least bytes, or returns nil.
func reserveMemory(size, least int) []byte {
	for ; size >= least; size /= 2 {
		region, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE|mapFlags)
		if err == nil {
			adviseHuge(region)
			return region
		}
	}
	return nil
}

// release unmaps all regions.
func (m *memory) release() {
	m.touches.Wait()
	for _, region := range m.regions {
		unmapMemory(region)
	}
	m.regions = nil
}

func unmapMemory(region []byte) { _ = unix.Munmap(region) }

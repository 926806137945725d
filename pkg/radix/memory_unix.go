//go:build unix

package radix

import "golang.org/x/sys/unix"

// reserveMemory maps address space that takes no memory until it is touched. It asks for less if the system refuses,
// down to least bytes, and returns nil if that is refused too.
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

// release gives everything back.
func (m *memory) release() {
	m.touches.Wait()
	for _, region := range m.regions {
		unmapMemory(region)
	}
	m.regions = nil
}

func unmapMemory(region []byte) { _ = unix.Munmap(region) }

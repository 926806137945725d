//go:build !unix

package radix

// reserveMemory returns nil: arrays stay on the heap.
func reserveMemory(int, int) []byte { return nil }

func (m *memory) release() {}

func unmapMemory([]byte) {}

func touchMemory([]byte) {}

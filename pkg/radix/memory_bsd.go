//go:build unix && !linux

package radix

const mapFlags = 0

func adviseHuge([]byte) {}

func touchMemory([]byte) {}

//go:build unix && !linux && !race

package radix

const mapFlags = 0

func adviseHuge([]byte) {}

func touchMemory([]byte) {}

//go:build !amd64

package radix

const vectors = false

func findVectors(*uint64, uint64, *uint64, int, *uint32) int { return 0 }

func enterVectors(*uint64, uint64, *uint64, int, *uint32) int { return 0 }

func removeVectors(*uint64, uint64, *uint64, int, *uint32) int { return 0 }

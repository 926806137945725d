package bench

import (
	"fmt"
	"os"
)

// resident returns the resident memory of this process in bytes.
func resident() (int64, error) {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0, fmt.Errorf("resident memory: %w", err)
	}
	var size, pages int64
	if _, err := fmt.Sscan(string(b), &size, &pages); err != nil {
		return 0, fmt.Errorf("resident memory: %w", err)
	}
	return pages * int64(os.Getpagesize()), nil
}

//go:build !linux

package cli

// unmapProgram does nothing on other systems.
func unmapProgram() {}

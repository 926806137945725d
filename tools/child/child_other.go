//go:build !linux

package child

import "syscall"

// DiesWithUs does nothing here.
func DiesWithUs() *syscall.SysProcAttr { return nil }

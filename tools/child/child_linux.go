// Package child is about processes that must not outlive the one that starts them.
package child

import "syscall"

// DiesWithUs has the kernel end a process when this one ends, however it does.
func DiesWithUs() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }

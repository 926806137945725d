// Package child prevents child processes from outliving their parent.
package child

import "syscall"

// DiesWithUs makes the kernel kill a child process at the end of this process, for any cause of the end.
func DiesWithUs() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }

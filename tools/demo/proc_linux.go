package demo

import "syscall"

// diesWithUs has the kernel end the process when this one ends, however it does.
func diesWithUs() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }

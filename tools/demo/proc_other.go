//go:build !linux

package demo

import "syscall"

func diesWithUs() *syscall.SysProcAttr { return nil }

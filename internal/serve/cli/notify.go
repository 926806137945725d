package cli

import (
	"fmt"
	"net"
	"os"
)

// NotifyReady notifies the service manager that this process is ready, as sd_notify(3) does for systemd units of
// Type=notify. Without NOTIFY_SOCKET it does nothing.
func NotifyReady() error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	// Package net treats an address with a leading @ as a name of Linux's abstract namespace, as systemd does.
	conn, err := net.Dial("unixgram", path)
	if err == nil {
		_, err = conn.Write([]byte("READY=1"))
		conn.Close()
	}
	if err != nil {
		return fmt.Errorf("notify NOTIFY_SOCKET that this process is ready: %w", err)
	}
	return nil
}

package cli

import (
	"fmt"
	"net"
	"os"
)

// NotifyReady says to the service manager that started this process that it is ready, as sd_notify(3) does for systemd
// units of Type=notify. Without one, where NOTIFY_SOCKET is not set, it does nothing.
func NotifyReady() error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	// net takes an address that begins with @ as one of Linux's abstract namespace, as systemd means it
	conn, err := net.Dial("unixgram", path)
	if err == nil {
		_, err = conn.Write([]byte("READY=1"))
		conn.Close()
	}
	if err != nil {
		return fmt.Errorf("say to NOTIFY_SOCKET that this process is ready: %w", err)
	}
	return nil
}

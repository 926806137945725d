package cli

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestNotifyReady: only the socket in the environment receives the notification. Without the variable, no notification
// is sent.
func TestNotifyReady(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	if err := NotifyReady(); err != nil {
		t.Errorf("without a service manager: %v", err)
	}
	dir, err := os.MkdirTemp("", "notify") // the path is short: a socket's path has at most 104 bytes
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "s")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	if err := NotifyReady(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 64)
	if n, err := l.Read(buf); err != nil || string(buf[:n]) != "READY=1" {
		t.Errorf("heard %q, %v", buf[:n], err)
	}
	t.Setenv("NOTIFY_SOCKET", filepath.Join(dir, "none"))
	if err := NotifyReady(); err == nil || !strings.Contains(err.Error(), "NOTIFY_SOCKET") {
		t.Errorf("a missing socket: %v", err)
	}
}

package zmtp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
)

// endpoint is a parsed address for dialling or listening, in the terms of package net.
type endpoint struct {
	text    string // the caller's text
	network string // "tcp" or "unix"
	host    string // tcp; "*" is loopback
	port    string
	addr    string // the address for package net; for unix, the path
}

// CheckEndpoint returns an error for an invalid endpoint. It opens no connection.
func CheckEndpoint(text string) error {
	_, err := parseEndpoint(text)
	return err
}

// CheckRemote returns an error unless the endpoint is tcp://HOST:PORT with a host that another machine can serve and
// that the rule permits. It is for endpoints that the operator did not name.
func CheckRemote(text string, rule *dial.Rule) error {
	if _, err := parseEndpoint(text); err != nil {
		return err
	}
	rest, isTCP := strings.CutPrefix(text, "tcp://")
	if !isTCP {
		return fmt.Errorf("zmtp: endpoint %q: clients may name only tcp://HOST:PORT", text)
	}
	host, _, err := dial.SplitHostPort(rest)
	if err == nil {
		err = rule.CheckHost(host)
	}
	if err != nil {
		return fmt.Errorf("zmtp: endpoint: %w", err)
	}
	return nil
}

// parseEndpoint reads tcp://HOST:PORT and ipc://PATH.
func parseEndpoint(text string) (endpoint, error) {
	e := endpoint{text: text}
	scheme, rest, ok := strings.Cut(text, "://")
	if !ok {
		return e, fmt.Errorf("zmtp: endpoint %q has no transport: want tcp://HOST:PORT or ipc://PATH", text)
	}
	switch scheme {
	case "ipc":
		if rest == "" || strings.Contains(rest, "\x00") {
			return e, fmt.Errorf("zmtp: endpoint %q has no usable path", text)
		}
		e.network, e.addr = "unix", rest
		return e, nil
	case "tcp":
		host, port, err := net.SplitHostPort(rest)
		if err != nil {
			return e, fmt.Errorf("zmtp: endpoint %q: %w", text, err)
		}
		if host == "" {
			return e, fmt.Errorf("zmtp: endpoint %q has no host", text)
		}
		if port == "*" {
			port = "0"
		}
		addr := net.JoinHostPort(host, port)
		if host == "*" {
			addr = net.JoinHostPort("127.0.0.1", port)
		}
		if _, err := strconv.ParseUint(port, 10, 16); err != nil {
			return e, fmt.Errorf("zmtp: endpoint %q: port %q is not a number from 0 to 65535", text, port)
		}
		e.network, e.host, e.port, e.addr = "tcp", host, port, addr
		return e, nil
	}
	if strings.Contains(rest, "@") { // another program's URL may contain a password
		text = scheme + "://..."
	}
	return e, fmt.Errorf("zmtp: endpoint %q: unknown transport %q: want tcp or ipc", text, scheme)
}

// keepAlive finds dead hosts on connections without heartbeats.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 4}

func (e endpoint) dial(ctx context.Context, timeout time.Duration, rule *dial.Rule) (net.Conn, error) {
	d := dial.Dialer{Rule: rule, Timeout: timeout, KeepAlive: keepAlive}
	return d.DialContext(ctx, e.network, e.addr)
}

// Probe connects to an endpoint and closes the connection at once. It returns nil if the port has a listener; [Refuses]
// reports whether an error means that the port has no listener. The rule restricts the address; nil permits every
// address.
func Probe(ctx context.Context, text string, timeout time.Duration, rule *dial.Rule) error {
	e, err := parseEndpoint(text)
	if err == nil {
		err = e.dialable()
	}
	if err != nil {
		return err
	}
	c, err := e.dial(ctx, timeout, rule)
	if err != nil {
		return err
	}
	return c.Close()
}

// Refuses reports whether a connection error means that the host is reachable and the endpoint has no listener: a
// refused connection, or a Unix socket without a file.
func Refuses(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT)
}

func (e endpoint) dialable() error {
	if e.network == "tcp" && strings.Trim(e.port, "0") == "" {
		return fmt.Errorf("zmtp: endpoint %q: port 0 cannot be dialled", e.text)
	}
	return nil
}

func (e endpoint) listen(ctx context.Context) (l net.Listener, err error) {
	if e.network == "unix" {
		l, err = ListenUnix(ctx, e.addr)
	} else {
		l, err = (&net.ListenConfig{KeepAliveConfig: keepAlive}).Listen(ctx, "tcp", e.addr)
	}
	if err != nil {
		return nil, fmt.Errorf("zmtp: listen on %s: %w", e.text, err)
	}
	return l, nil
}

// ListenUnix listens on a Unix socket. It replaces a socket file without a listener, as a killed process leaves behind.
// A socket file with a listener, or a file of another kind, is an error.
func ListenUnix(ctx context.Context, path string) (net.Listener, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "unix", path)
	if errors.Is(err, syscall.EADDRINUSE) && stale(ctx, path) {
		if err := os.Remove(path); err != nil {
			return nil, err
		}
		l, err = new(net.ListenConfig).Listen(ctx, "unix", path)
	}
	return l, err
}

// stale reports whether the path is a socket without a listener.
func stale(ctx context.Context, path string) bool {
	fi, err := os.Lstat(path)
	if err != nil || fi.Mode()&os.ModeSocket == 0 {
		return false
	}
	d := net.Dialer{Timeout: time.Second}
	c, err := d.DialContext(ctx, "unix", path)
	if err == nil {
		c.Close()
		return false
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// listenAddr returns the endpoint for clients on this host.
func listenAddr(e endpoint, l net.Listener) string {
	a, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		return e.text
	}
	host := a.IP.String()
	if a.IP.IsUnspecified() {
		host = "127.0.0.1"
		if e.host != "*" && a.IP.To4() == nil {
			host = "::1"
		}
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(a.Port))
}

// PortsAfter returns the endpoint with its port increased by the given number. Engines number the ports of their
// data-parallel ranks in this way. The result for an empty endpoint is empty.
func PortsAfter(endpoint string, by uint32) (string, error) {
	if by == 0 || endpoint == "" {
		return endpoint, nil
	}
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", fmt.Errorf("several ranks need tcp:// endpoints: %s has no port to count from", endpoint)
	}
	host, text, err := net.SplitHostPort(rest)
	if err != nil {
		return "", err
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port+uint64(by) > 65535 {
		return "", fmt.Errorf("%s: port %s + %d is out of range", endpoint, text, by)
	}
	return "tcp://" + net.JoinHostPort(host, strconv.FormatUint(port+uint64(by), 10)), nil
}

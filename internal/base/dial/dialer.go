package dial

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"syscall"
	"time"
)

// Dialer connects to the addresses that a rule permits.
type Dialer struct {
	Rule      *Rule // nil permits all
	Timeout   time.Duration
	KeepAlive net.KeepAliveConfig
}

// Quick returns a dialer for short requests, which detects an unresponsive host soon.
func Quick(rule *Rule) Dialer {
	return Dialer{Rule: rule, Timeout: 2 * time.Second,
		KeepAlive: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 5 * time.Second}}
}

// DialContext connects like [net.Dialer.DialContext]. With a rule, it connects only over TCP and only to permitted
// addresses, and the error has a fixed text.
func (d Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	plain := net.Dialer{Timeout: d.Timeout, KeepAliveConfig: d.KeepAlive}
	if d.Rule == nil {
		return plain.DialContext(ctx, network, address)
	}
	if !strings.HasPrefix(network, "tcp") {
		d.Rule.deny(network + "://" + address)
		return nil, ErrDenied
	}
	plain.ControlContext = d.Rule.control
	c, err := plain.DialContext(ctx, network, address)
	if errors.Is(err, ErrDenied) {
		d.Rule.deny(address)
	}
	if err != nil {
		return nil, Fixed(err)
	}
	return c, nil
}

// control is called with the resolved address before each connect call.
func (r *Rule) control(_ context.Context, _, address string, _ syscall.RawConn) error {
	if at, err := netip.ParseAddrPort(address); err != nil || !r.Allows(at.Addr()) {
		return ErrDenied
	}
	return nil
}

// Probe connects to HOST:PORT and closes the connection. nil means that a process listens there; see [Refuses]. The
// error is ErrDenied if the rule forbids the address. Denied does not count a probe.
func Probe(ctx context.Context, rule *Rule, address string, timeout time.Duration) error {
	d := net.Dialer{Timeout: timeout}
	if rule != nil {
		d.ControlContext = rule.control
	}
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return Fixed(err)
	}
	return c.Close()
}

// Refuses reports whether a connect error proves that the host is up and that no process listens at the address.
func Refuses(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

// Client returns an HTTP client with connections under the rule. It does not follow redirects. With a rule, it ignores
// the proxies of the environment, because a proxy would open the connections.
func Client(rule *Rule, timeout time.Duration) *http.Client {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	if rule != nil {
		transport.Proxy = nil
		transport.DialContext = Dialer{Rule: rule, Timeout: 30 * time.Second}.DialContext
	}
	return &http.Client{
		Transport:     transport,
		Timeout:       timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// fixedError replaces the text of an error.
type fixedError struct {
	text string
	err  error
}

func (e *fixedError) Error() string { return e.text }
func (e *fixedError) Unwrap() error { return e.err }

// Fixed returns an error that wraps err, with a text without words of a server, a resolver or a certificate. It is for
// errors of connections and HTTP. nil stays nil.
func Fixed(err error) error {
	if err == nil {
		return nil
	}
	var named *net.DNSError
	var late net.Error
	text := "the connection failed, or the answer is not valid HTTP"
	switch {
	case errors.Is(err, ErrDenied):
		text = ErrDenied.Error()
	case errors.Is(err, context.Canceled):
		text = context.Canceled.Error()
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &late) && late.Timeout():
		text = "timeout"
	case errors.As(err, &named):
		text = "the host name cannot be resolved"
	case errors.Is(err, syscall.ECONNREFUSED):
		text = "connection refused"
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		text = "connection reset"
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		text = "the host cannot be reached"
	}
	return &fixedError{text, err}
}

// LocalAddress returns the IP address from which this host sends packets to server (IP:PORT). It sends no packet.
func LocalAddress(server string) (string, error) {
	conn, err := net.Dial("udp", server)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	host, _, err := net.SplitHostPort(conn.LocalAddr().String())
	return host, err
}

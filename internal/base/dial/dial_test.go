package dial

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"
)

func mustRule(t testing.TB, cidrs ...string) *Rule {
	t.Helper()
	r, err := NewRule(cidrs)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestRules compares rules with permitted and forbidden addresses, in all forms of an address.
func TestRules(t *testing.T) {
	usual, all := mustRule(t, Default()...), mustRule(t, "0.0.0.0/0", "::/0", "64:ff9b::/96")
	for text, want := range map[string]string{
		"127.0.0.1": "usual all", "127.9.9.9": "usual all", "::1": "usual all", "10.1.2.3": "usual all",
		"172.16.0.1": "usual all", "172.32.0.1": "all", "192.168.1.1": "usual all", "100.64.0.1": "usual all",
		"100.128.0.1": "all", "fd12::1": "usual all", "fc00::1": "usual all", "8.8.8.8": "all", "2600::1": "all",
		"::ffff:10.1.2.3": "usual all", "::ffff:8.8.8.8": "all", "64:ff9b::8.8.8.8": "all", "64:ff9b::10.1.2.3": "all",

		"169.254.169.254": "", "169.254.0.1": "", "::ffff:169.254.169.254": "", "::169.254.169.254": "",
		"64:ff9b::169.254.169.254": "", "64:ff9b:1::a9fe:a9fe": "", "2002:a9fe:a9fe::1": "", "2001:0:1::1": "",
		"fe80::1": "", "fe80::1%eth0": "", "fd00:ec2::254%eth0": "", "fec0::1": "", "0.0.0.0": "", "0.1.2.3": "", "::": "",
		"224.0.0.1": "", "239.1.1.1": "", "255.255.255.255": "", "240.0.0.1": "", "ff02::1": "", "::ffff:0.0.0.0": "",
		"100.100.100.200": "", "fd00:ec2::254": "", "fd00:ec2::23": "", "fd20:ce::254": "", "168.63.129.16": "",
		"192.0.0.192": "", "fd00:c1::a9fe:a9fe": "", "fd00:42::42": "", "::ffff:100.100.100.200": "",
	} {
		addr := netip.MustParseAddr(text)
		var got []string
		for _, r := range []struct {
			name string
			rule *Rule
		}{{"usual", usual}, {"all", all}} {
			if r.rule.Allows(addr) {
				got = append(got, r.name)
			}
			if (&Rule{}).Allows(addr) || !(*Rule)(nil).Allows(addr) {
				t.Errorf("%s: permitted by the empty rule, or forbidden without a rule", text)
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s is permitted by %q, not %q", text, got, want)
		}
	}
	if mustRule(t, "64:ff9b::/96").Allows(netip.MustParseAddr("64:ff9b::8.8.8.8")) {
		t.Error("a NAT64 address with a forbidden IPv4 address is permitted")
	}
	for _, bad := range []string{"x", "10.0.0.0/33", "169.254.0.0/16", "169.254.169.254", "fe80::/10",
		"::ffff:10.0.0.0/104", "fe80::1%eth0", "224.0.0.0/8", "0.0.0.0/8", "100.100.100.200", "fd00:ec2::254", ""} {
		if _, err := NewRule([]string{bad}); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

// TestDialJudgesTheResolvedAddress connects to a listener on loopback under many names.
func TestDialJudgesTheResolvedAddress(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	connect := func(rule *Rule, network, address string) error {
		c, err := Dialer{Rule: rule, Timeout: time.Minute}.DialContext(t.Context(), network, address)
		if err == nil {
			c.Close()
		}
		return err
	}
	loopback, other := mustRule(t, "127.0.0.0/8", "::1/128"), mustRule(t, "10.0.0.0/8")
	for _, host := range []string{"127.0.0.1", "localhost", "::ffff:127.0.0.1"} {
		at := net.JoinHostPort(host, port)
		if err := connect(loopback, "tcp", at); err != nil {
			t.Errorf("%s is permitted: %v", at, err)
		}
		if err := connect(other, "tcp", at); !errors.Is(err, ErrDenied) || strings.Contains(err.Error(), "127") {
			t.Errorf("%s is not permitted: %v", at, err)
		}
	}
	before := other.Denied()
	for _, host := range []string{"0.0.0.0", "::", "0", "2130706433", "0x7f000001", "017700000001", "127.1", "::1"} {
		if err := connect(other, "tcp", net.JoinHostPort(host, port)); err == nil {
			t.Errorf("%s is dialled", host)
		}
	}
	if err := connect(loopback, "unix", "/nonexistent"); !errors.Is(err, ErrDenied) {
		t.Errorf("a unix socket: %v", err)
	}
	if n := other.Denied(); n < before+3 {
		t.Errorf("%d counted dials before, %d after", before, n)
	}
	if p := other.Problem(time.Now()); !strings.Contains(p, "outside --dial-allow") ||
		other.Problem(time.Now().Add(lately+1)) != "" {
		t.Errorf("the problem is %q", p)
	}
	if loopback.Problem(time.Now().Add(-time.Hour)) == "" || (*Rule)(nil).Problem(time.Now()) != "" {
		t.Error("the unix socket is not a problem, or a nil rule has one")
	}
}

// TestClient uses a server that redirects, and a proxy in the environment.
func TestClient(t *testing.T) {
	t.Setenv("HTTP_PROXY", "http://127.0.0.1:1")
	reached := make(chan string, 10)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		reached <- r.URL.Path
		http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
	}))
	defer s.Close()
	for _, c := range []struct {
		rule *Rule
		want string
	}{{nil, "307 /x"}, {mustRule(t, "127.0.0.0/8"), "307 /x"}, {mustRule(t, "10.0.0.0/8"), ErrDenied.Error()}} {
		got := ""
		r, err := Client(c.rule, time.Minute).Get(s.URL + "/x")
		if err == nil {
			r.Body.Close()
			got = fmt.Sprint(r.StatusCode, " ", <-reached)
		} else if got = Fixed(err).Error(); !errors.Is(Fixed(err), ErrDenied) {
			t.Error(err)
		}
		if got != c.want || len(reached) > 0 {
			t.Errorf("%s, and %d more requests; want %s", got, len(reached), c.want)
		}
	}
	if transport := Client(&Rule{}, 0).Transport.(*http.Transport); transport.Proxy != nil {
		t.Error("a client with a rule uses the proxies of the environment")
	}
	if Fixed(nil) != nil {
		t.Error("Fixed(nil) is an error")
	}
}

// TestAddresses parses addresses of all kinds.
func TestAddresses(t *testing.T) {
	for text, want := range map[string]string{
		"a:1": "a 1", "engine-1.ns_2.svc.:65535": "engine-1.ns_2.svc. 65535", "[::1]:9003": "::1 9003",
		"10.0.0.1:80": "10.0.0.1 80",

		"a": "", "a:": "", ":1": "", "a:0": "", "a:65536": "", "a:01": "", "a:+1": "", "a:x": "", "a/b?x:80": "", "a#:80": "",
		"u@a:80": "", "a b:80": "", "a\r\nHost: b:80": "", "[fe80::1%eth0]:80": "", "a..b:80": "", "a\x00:80": "", "é:80": "",
		"http://a:80": "", "a:80/x": "", "[::1]": "", "[a]x:80": "", "*:80": "", "%61:80": "", strings.Repeat("a", 64) + ":80": "",
		strings.Repeat("a.", 130) + "a:80": "", "": "",
	} {
		host, port, err := SplitHostPort(text)
		got := ""
		if err == nil {
			got = host + " " + port
		} else if strings.Contains(err.Error(), "u@") {
			t.Errorf("the error may contain a password: %v", err)
		}
		if got != want {
			t.Errorf("%q is %q, %v; want %q", text, got, err, want)
		}
	}
	for text, good := range map[string]bool{
		"http://a": true, "http://a:8000": true, "https://a:8000/v1": true, "http://[::1]:80/": true, "10.0.0.1:80": true,
		"a": true, "[::1]": true, "grpc://a:1": true, "http://a:1/v1/": true, "[fd00::2]:8000": true,
		"http://[fd00::2]:8000": true, "https://[fd00::2]": true,

		// IPv6 addresses without brackets, from http://$(POD_IP):8000 on an IPv6 cluster.
		"http://fd00::2:8000": false, "http://fd00::2": false, "fd00::2:8000": false, "::1": false, "grpc://::1:80": false,
		"http://fd00:1:2:3:4:5:6:7:8000": false, "http://::ffff:10.0.0.1:8000": false, "http://fd00::2:8000/v1": false,
		"http://fd00::2]:8000": false, "http://[fd00::2:8000": false, "http://[[fd00::2]]:8000": false,

		"http://": false, "http://a:0": false, "http://a/b": false, "http://a?x": false, "http://a#x": false,
		"http://u:p@a": false, "ftp://a": false, "file:///etc/passwd": false, "ipc:///x": false, "unix:/x": false, "/etc": false,
		"http://a b": false, "http://169.254.169.254/v1": false, "169.254.169.254:80": false, "http://[fe80::1%25eth0]:80": false,
		"http://[::ffff:169.254.169.254]": false, "tcp://a:1": false, "a:1/v1": false, "http://a\n": false, "": false,
	} {
		if err := CheckServing(text); (err == nil) != good {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// FuzzSplitHostPort: an accepted address has the same meaning in a URL.
func FuzzSplitHostPort(f *testing.F) {
	for _, text := range []string{"a:1", "[::1]:80", "a/b:80", "a@b:80", "[fe80::1%eth0]:80", "[::ffff:1.2.3.4]:80"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		host, port, err := SplitHostPort(text)
		if err != nil {
			return
		}
		at := url.URL{Scheme: "http", Host: net.JoinHostPort(host, port), Path: "/health"}
		u, err := url.Parse(at.String())
		if err != nil || u.Hostname() != host || u.Port() != port || u.Path != "/health" || u.User != nil ||
			u.RawQuery != "" {
			t.Errorf("%q is the URL %q: %v", text, at.String(), err)
		}
		if err := CheckServing("http://" + text); err != nil && !errors.Is(err, ErrDenied) {
			t.Errorf("%q: %v", text, err)
		}
	})
}

// TestSecretsGoToListedAddresses checks a list of all three kinds.
func TestSecretsGoToListedAddresses(t *testing.T) {
	list, err := ParseAddresses([]string{"engine-1:8000", "Engine-2", "10.0.0.0/8", "192.168.0.1", "fd00::/8",
		"[fc00::1]:80"})
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]bool{
		"http://engine-1:8000": true, "http://ENGINE-1.:8000": true, "http://engine-1:8001": false, "http://engine-1": false,
		"https://engine-2": true, "http://engine-2:1": true, "http://10.1.2.3:9": true, "http://[::ffff:10.1.2.3]:9": true,
		"http://192.168.0.1": true, "http://192.168.0.2": false, "http://[fd00::1]:8000": true, "http://[fc00::1]": true,
		"http://[fc00::1]:81": false, "http://10.evil.example": false, "http://engine-2.evil.example": false,
		"http://engine-2@evil.example": false, "http://167837955": false, "http://0xa.1": false, "http://10.1.2.3.": false,
	} {
		u, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		if list.Contains(u) != want || (*Addresses)(nil).Contains(u) {
			t.Errorf("%s: %v", text, !want)
		}
	}
	for _, bad := range []string{"http://a", "a/b", "a:x", "", "u@a", "10.0.0.0/99"} {
		if _, err := ParseAddresses([]string{bad}); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

// TestServingAddresses: the dialled address of a serving address.
func TestServingAddresses(t *testing.T) {
	for text, want := range map[string]string{
		"http://a": "a:80", "https://A.": "a:443", "http://a:8000/v1": "a:8000", "https://[::1]:80/": "[::1]:80",
		"10.0.0.1:80": "10.0.0.1:80", "grpc://a:1": "a:1", "http://[::1]": "[::1]:80", "http://10.0.0.1": "10.0.0.1:80",

		"a": "", "::1": "", "grpc://a": "", "grpcs://a": "", "": "", "http://": "", "ftp://a:1": "", "http://a:1?x": "",
		"http://169.254.169.254:80": "",
	} {
		if got, ok := ServingAddress(text); got != want || ok != (want != "") {
			t.Errorf("of %q: %q, %v; want %q", text, got, ok, want)
		}
	}
}

// TestProbe: a probe distinguishes a listener from a refused connection. A forbidden probe does not count as a dial.
func TestProbe(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	loopback, other := mustRule(t, "127.0.0.0/8"), mustRule(t, "10.0.0.0/8")
	for _, rule := range []*Rule{nil, loopback} {
		if err := Probe(t.Context(), rule, address, time.Minute); err != nil {
			t.Error(err)
		}
	}
	if err := Probe(t.Context(), other, address, time.Minute); !errors.Is(err, ErrDenied) || Refuses(err) ||
		other.Denied() != 0 || other.Problem(time.Now()) != "" {
		t.Errorf("forbidden: %v, %d counted", err, other.Denied())
	}
	l.Close()
	for _, rule := range []*Rule{nil, loopback} {
		if err := Probe(t.Context(), rule, address, time.Minute); !Refuses(err) {
			t.Errorf("nobody listens: %v", err)
		}
	}
	if Refuses(nil) || Refuses(context.DeadlineExceeded) {
		t.Error("another error counts as a refusal")
	}
}

// TestLocalAddress finds the address of this host that a server on loopback sees.
func TestLocalAddress(t *testing.T) {
	for server, want := range map[string]string{"127.0.0.1:4222": "127.0.0.1", "[::1]:4222": "::1"} {
		if host, err := LocalAddress(server); err != nil || host != want {
			t.Errorf("%s: %q, %v; want %q", server, host, err, want)
		}
	}
	if host, err := LocalAddress("127.0.0.1"); err == nil {
		t.Errorf("an address without a port: %q", host)
	}
}

package dial

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// SplitHostPort parses HOST:PORT. The host is a name or an IP address without a zone, the port a number from 1 to
// 65535. Any other content is an error, so the text cannot change the meaning of a URL.
func SplitHostPort(text string) (host, port string, err error) {
	host, port, err = net.SplitHostPort(text)
	if err != nil {
		return "", "", fmt.Errorf("%s is not HOST:PORT", shown(text))
	}
	if err := CheckHost(host); err != nil {
		return "", "", err
	}
	return host, port, checkPort(text, port)
}

func checkPort(text, port string) error {
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || strconv.FormatUint(n, 10) != port {
		return fmt.Errorf("%s has no port from 1 to 65535", shown(text))
	}
	return nil
}

// CheckHost returns an error for a text that is neither an IP address without a zone nor a host name.
func CheckHost(host string) error {
	if addr, err := netip.ParseAddr(host); err == nil {
		if addr.Zone() != "" {
			return fmt.Errorf("%s has a zone; only link-local addresses have one, and they are never dialled", shown(host))
		}
		return nil
	}
	good := len(host) <= 253
	for label := range strings.SplitSeq(strings.TrimSuffix(host, "."), ".") {
		good = good && label != "" && len(label) <= 63
		for i := range len(label) {
			c := label[i]
			good = good && ('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_')
		}
	}
	if !good {
		return fmt.Errorf("%s is neither a host name nor an IP address", shown(host))
	}
	return nil
}

// shown formats an address for an error. It omits an address that may contain a password.
func shown(text string) string {
	if strings.Contains(text, "@") {
		return "the address (not shown: it contains @)"
	}
	return fmt.Sprintf("%.80q", text)
}

// servingSchemes are the schemes of serving addresses.
var servingSchemes = []string{"http", "https", "grpc", "grpcs"}

// CheckServing returns an error for a text that is not a serving address of a worker: HOST, HOST:PORT, SCHEME://HOST or
// SCHEME://HOST:PORT. The scheme is http, https, grpc or grpcs, and only / or /v1 may follow. An IPv6 address must have
// brackets, because fd00::2:8000 is ambiguous. IP addresses of [Never] are errors too.
func CheckServing(text string) error {
	_, _, err := splitServing(text)
	return err
}

// ServingAddress returns the HOST:PORT of a serving address. ok is false for an invalid address, and for an address
// without a port and without the scheme http or https.
func ServingAddress(text string) (address string, ok bool) {
	host, port, err := splitServing(text)
	if scheme, _, _ := strings.Cut(text, "://"); port == "" {
		port = schemePorts[scheme]
	}
	if err != nil || port == "" {
		return "", false
	}
	return net.JoinHostPort(canonical(host), port), true
}

// splitServing splits a serving address. The port may be empty.
func splitServing(text string) (host, port string, err error) {
	rest := text
	if scheme, after, isURL := strings.Cut(text, "://"); isURL {
		if !slices.Contains(servingSchemes, scheme) {
			return "", "", fmt.Errorf("%s does not begin with http://, https://, grpc:// or grpcs://", shown(text))
		}
		rest = strings.TrimSuffix(strings.TrimSuffix(after, "/"), "/v1")
	}
	host = rest
	if strings.Count(rest, ":") > 1 && !strings.HasPrefix(rest, "[") {
		return "", "", fmt.Errorf("%s has an IPv6 address without brackets; write [ADDRESS]:PORT, as in "+
			"http://[fd00::2]:8000", shown(text))
	}
	if strings.ContainsAny(rest, ":[]") {
		if inner, bracketed := strings.CutPrefix(rest, "["); bracketed && strings.HasSuffix(inner, "]") {
			host = strings.TrimSuffix(inner, "]")
		} else if host, port, err = net.SplitHostPort(rest); err != nil {
			return "", "", fmt.Errorf("%s is not HOST:PORT or http://HOST:PORT", shown(text))
		} else if err := checkPort(text, port); err != nil {
			return "", "", err
		}
	}
	if err := CheckHost(host); err != nil {
		return "", "", fmt.Errorf("%s is not HOST:PORT or http://HOST:PORT: %w", shown(text), err)
	}
	if addr, err := netip.ParseAddr(host); err == nil && Never(addr) {
		return "", "", fmt.Errorf("%s: %w", shown(text), ErrDenied)
	}
	return host, port, nil
}

// schemePorts are the default ports of URLs.
var schemePorts = map[string]string{"http": "80", "https": "443"}

// Addresses is a list of addresses that may receive a secret.
type Addresses struct {
	networks []netip.Prefix
	names    map[string]bool // hosts, and HOST:PORT
}

// ParseAddresses parses a list of HOST:PORT, HOST and CIDR. A HOST covers all ports. A CIDR covers servers with an IP
// address as their name.
func ParseAddresses(list []string) (*Addresses, error) {
	a := &Addresses{names: map[string]bool{}}
	var errs []error
	for _, text := range list {
		if p, err := parsePrefix(text); err == nil {
			a.networks = append(a.networks, p)
			continue
		}
		host, port, err := SplitHostPort(text)
		switch {
		case err == nil:
			a.names[net.JoinHostPort(canonical(host), port)] = true
		case CheckHost(text) == nil:
			a.names[canonical(text)] = true
		default:
			errs = append(errs, fmt.Errorf("%s is not HOST:PORT, a host or a CIDR", shown(text)))
		}
	}
	return a, errors.Join(errs...)
}

// canonical returns the form of a host for comparisons.
func canonical(host string) string {
	if addr, err := netip.ParseAddr(host); err == nil {
		return addr.Unmap().String()
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

// Contains reports whether the list has the server of a URL. The default port of a URL depends on the scheme. A nil
// list contains nothing.
func (a *Addresses) Contains(u *url.URL) bool {
	if a == nil {
		return false
	}
	host, port := u.Hostname(), u.Port()
	if port == "" {
		port = schemePorts[u.Scheme]
	}
	if addr, err := netip.ParseAddr(host); err == nil && within(a.networks, addr.Unmap()) {
		return true
	}
	return a.names[canonical(host)] || a.names[net.JoinHostPort(canonical(host), port)]
}

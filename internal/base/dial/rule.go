package dial

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// ErrDenied is the error of a connect call to a forbidden address.
var ErrDenied = errors.New("the address is not within --dial-allow, or is never dialled")

// Default returns the permitted networks without --dial-allow: loopback, and the private ranges of RFC 1918, RFC 6598
// and RFC 4193.
func Default() []string {
	return []string{"127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"}
}

// never lists the networks that every rule forbids.
var never = prefixes(
	"0.0.0.0/8",       // this host
	"169.254.0.0/16",  // link-local, and the metadata services of most clouds
	"224.0.0.0/4",     // multicast
	"240.0.0.0/4",     // reserved, and broadcast
	"100.100.100.200", // metadata of Alibaba Cloud
	"168.63.129.16",   // Azure's host
	"192.0.0.0/24",    // protocol assignments, and metadata of Oracle Cloud
	"::/96",           // unspecified, and IPv4-compatible; [loopback6] is an exception
	"fe80::/10",       // link-local
	"fec0::/10",       // site-local, deprecated
	"ff00::/8",        // multicast
	"2001::/32",       // Teredo, which contains IPv4 addresses
	"2002::/16",       // 6to4, which contains IPv4 addresses
	"64:ff9b:1::/48",  // local NAT64, with IPv4 addresses at unknown positions
	"fd00:ec2::/32",   // metadata and other services of the host at AWS
	"fd20:ce::254",    // metadata of Google Cloud
	"fd00:c1::/32",    // metadata of Oracle Cloud
	"fd00:42::42",     // metadata of Scaleway
)

var (
	loopback6 = netip.IPv6Loopback()
	nat64     = netip.MustParsePrefix("64:ff9b::/96") // the IPv4 address is in the last 32 bits
)

func prefixes(list ...string) (out []netip.Prefix) {
	for _, text := range list {
		p, err := parsePrefix(text)
		if err != nil {
			panic(err) // a mistake in the list
		}
		out = append(out, p)
	}
	return out
}

// parsePrefix parses a CIDR or a single address.
func parsePrefix(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if err != nil {
		addr, failed := netip.ParseAddr(text)
		if failed != nil || addr.Zone() != "" {
			return p, fmt.Errorf("%.80q is not a CIDR such as 10.0.0.0/8", text)
		}
		p = netip.PrefixFrom(addr, addr.BitLen())
	}
	if p.Addr().Is4In6() {
		return p, fmt.Errorf("%.80q contains IPv4 addresses; write them as IPv4", text)
	}
	return p.Masked(), nil
}

// Never reports whether every rule forbids an address: link-local, multicast, broadcast, reserved and unspecified
// addresses, metadata services of clouds, and IPv6 addresses that translate to such an IPv4 address.
func Never(addr netip.Addr) bool {
	addr = plain(addr)
	if addr == loopback6 {
		return false
	}
	return within(never, addr) || nat64.Contains(addr) && Never(embedded(addr))
}

// plain returns an address without a zone, and as IPv4 if it is an IPv4-mapped IPv6 address.
func plain(addr netip.Addr) netip.Addr { return addr.Unmap().WithZone("") }

// embedded returns the IPv4 address of a NAT64 address.
func embedded(addr netip.Addr) netip.Addr {
	b := addr.As16()
	return netip.AddrFrom4([4]byte(b[12:]))
}

func within(list []netip.Prefix, addr netip.Addr) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// Rule is the set of permitted addresses. The zero value permits none, nil permits all.
type Rule struct {
	allowed []netip.Prefix
	denied  atomic.Uint64
	last    atomic.Pointer[refusal]
}

// refusal is a forbidden address, as named by the caller.
type refusal struct {
	address string
	at      time.Time
}

func (r *Rule) deny(address string) {
	r.denied.Add(1)
	r.last.Store(&refusal{address, time.Now()})
}

// lately is the time for which a refusal is reported as a problem.
const lately = 2 * time.Minute

// Problem describes the latest forbidden address within lately, or returns "".
func (r *Rule) Problem(now time.Time) string {
	if r == nil {
		return ""
	}
	last := r.last.Load()
	if last == nil || now.Sub(last.at) > lately {
		return ""
	}
	return fmt.Sprintf("%d connections to registered addresses outside --dial-allow were refused, the last to %.80q; "+
		"what to do: add its network to --dial-allow, or register the address at which the worker is",
		r.denied.Load(), last.address)
}

// NewRule returns the rule that permits the networks in a list of CIDRs, except for the addresses of [Never].
func NewRule(cidrs []string) (*Rule, error) {
	r := &Rule{}
	var errs []error
	for _, text := range cidrs {
		p, err := parsePrefix(strings.TrimSpace(text))
		if err == nil && slices.ContainsFunc(never, func(n netip.Prefix) bool {
			return n.Bits() <= p.Bits() && n.Contains(p.Addr()) && p.Addr() != loopback6
		}) {
			err = fmt.Errorf("%s is never dialled", p)
		}
		if err != nil {
			errs = append(errs, err)
		}
		r.allowed = append(r.allowed, p)
	}
	return r, errors.Join(errs...)
}

// Allows reports whether the rule permits an address. A NAT64 address is permitted if both it and its IPv4 address are.
func (r *Rule) Allows(addr netip.Addr) bool {
	if r == nil {
		return true
	}
	addr = plain(addr)
	return addr.IsValid() && !Never(addr) && within(r.allowed, addr) && (!nat64.Contains(addr) || r.Allows(embedded(addr)))
}

// CheckHost returns ErrDenied if a host is a forbidden IP address. A name is checked at the connect call.
func (r *Rule) CheckHost(host string) error {
	if addr, err := netip.ParseAddr(host); err == nil && !r.Allows(addr) {
		return fmt.Errorf("%.80q: %w", host, ErrDenied)
	}
	return nil
}

// Denied returns the number of refused connections.
func (r *Rule) Denied() uint64 {
	if r == nil {
		return 0
	}
	return r.denied.Load()
}

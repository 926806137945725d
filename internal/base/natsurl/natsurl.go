// Package natsurl checks the addresses of NATS servers, and removes secrets from addresses for logs and errors.
//
//	natsurl.Check("tls://user:pw@h:4222")   // nil
//	natsurl.Shown("tls://user:pw@h:4222")   // tls://user:xxxxx@h:4222
//
// The functions are safe for concurrent use.
package natsurl

import (
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// Check returns an error for an invalid address of a NATS server. A valid address is HOST, or
// SCHEME://USER:PASSWORD@HOST:PORT with a scheme of nats, tls, ws or wss; only the host is required. The error contains
// no secret.
func Check(address string) error {
	full := address
	if !strings.Contains(full, "://") {
		full = "nats://" + full
	}
	u, err := url.Parse(full)
	switch {
	case err != nil && strings.Contains(address, "@"): // the parser's text may contain a part of the password
		return fmt.Errorf(
			"address %q cannot be read; in a user or password, signs like / : @ %% are written as %%2F %%3A %%40 %%25",
			Shown(address))
	case err != nil:
		return fmt.Errorf("address %w", err)
	case !slices.Contains([]string{"nats", "tls", "ws", "wss"}, u.Scheme):
		return fmt.Errorf("address %q: scheme %q is none of nats, tls, ws, wss", Shown(address), u.Scheme)
	case u.Hostname() == "" || strings.Contains(u.Hostname(), ":") && !strings.HasPrefix(u.Host, "["):
		return fmt.Errorf("address %q has no host, or an IPv6 address without brackets", Shown(address))
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return fmt.Errorf("address %q: port %q is not a number from 1 to 65535", Shown(address), port)
		}
	}
	return nil
}

// Shown returns an address, or a list of addresses separated by commas, without passwords and tokens.
func Shown(address string) string {
	const hidden = "xxxxx"
	list := strings.Split(address, ",")
	for i, a := range list {
		scheme, rest, found := strings.Cut(a, "://")
		if !found {
			scheme, rest = "", a
		} else {
			scheme += "://"
		}
		at := strings.LastIndexByte(rest, '@')
		if at < 0 {
			continue
		}
		user, _, withPassword := strings.Cut(rest[:at], ":")
		if withPassword {
			user += ":" + hidden
		} else {
			user = hidden // a token
		}
		list[i] = scheme + user + rest[at:]
	}
	return strings.Join(list, ",")
}

package cli

import (
	"bytes"
	"crypto/tls"
	"errors"
	"maps"
	"net"
	"os"
	"slices"

	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/spf13/pflag"
)

// HTTPSecurity restricts the access to HTTP ports.
type HTTPSecurity struct {
	Tokens *rights.Tokens // requests must present one of the tokens; nil disables the check
	TLS    *tls.Config

	tokenFile, cert, key string
	clear                []string // addresses without TLS that other hosts can reach
}

// HTTPSecurityFlags adds --http-token-file, --http-cert and --http-key. what names the served ports in the help texts.
func HTTPSecurityFlags(f *pflag.FlagSet, what string) *HTTPSecurity {
	s := &HTTPSecurity{}
	f.StringVar(&s.tokenFile, "http-token-file", "",
		"file with the bearer tokens for "+what+" requests, each in a line \"ROLE[,ROLE] TOKEN\" "+
			"(roles: read, route, register, operate) or \"TOKEN\" (all roles); changes take effect within seconds; "+
			"required to listen on other addresses than loopback")
	f.StringVar(&s.cert, "http-cert", "", "certificate file (PEM) to serve "+what+" over TLS")
	f.StringVar(&s.key, "http-key", "", "its key")
	return s
}

// TokenFile reads the token in a file that a flag names; empty without a file. The error is a usage error.
func TokenFile(flag, path string) (token string, err error) {
	if path == "" {
		return "", nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return "", UsageErrorf("--%s: %w", flag, err)
	}
	return string(bytes.TrimSpace(text)), nil
}

// Check reads the files of the flags. listen contains the HTTP addresses, by flag. A port outside of loopback needs
// tokens, because its answers reveal prompts, and it executes commands.
func (s *HTTPSecurity) Check(listen map[string]string) error {
	var wrong Complaints
	if (s.cert == "") != (s.key == "") {
		wrong.When(true, "--http-cert and --http-key go together")
	} else if s.cert != "" {
		pair, err := tls.LoadX509KeyPair(s.cert, s.key)
		wrong.About("--http-cert, --http-key", err)
		s.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	}
	if s.tokenFile != "" {
		var err error
		s.Tokens, err = rights.Open(s.tokenFile)
		wrong.About("--http-token-file", err)
	}
	for _, flag := range slices.Sorted(maps.Keys(listen)) {
		host, _, err := net.SplitHostPort(listen[flag])
		wrong.When(err == nil && s.tokenFile == "" && !OnLoopback(host),
			"%s %s is reachable from other hosts: give --http-token-file, or listen on 127.0.0.1", flag, listen[flag])
		if err == nil && s.cert == "" && !OnLoopback(host) {
			s.clear = append(s.clear, flag+" "+listen[flag])
		}
	}
	return errors.Join(wrong...)
}

// Unused returns an error for the flags with a value. The flag listen has none, so no port is open.
func (s *HTTPSecurity) Unused(listen string) error {
	var wrong Complaints
	for _, f := range []struct{ name, value string }{{"--http-cert", s.cert}, {"--http-key", s.key},
		{"--http-token-file", s.tokenFile}} {
		wrong.When(f.value != "", "%s has no effect without %s: give %s, or omit %s", f.name, listen, listen, f.name)
	}
	return wrong.Usage()
}

// ClearText returns the flags and addresses where tokens cross the network in clear text.
func (s *HTTPSecurity) ClearText() []string { return s.clear }

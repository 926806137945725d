package cli

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"

	"github.com/spf13/pflag"
)

// HTTPSecurity is how HTTP ports are kept to those who may use them.
type HTTPSecurity struct {
	Token []byte // that requests must bring; nil: none
	TLS   *tls.Config

	tokenFile, cert, key string
}

// HTTPSecurityFlags adds --http-token-file, --http-cert and --http-key. what is served so.
func HTTPSecurityFlags(f *pflag.FlagSet, what string) *HTTPSecurity {
	s := &HTTPSecurity{}
	f.StringVar(&s.tokenFile, "http-token-file", "",
		"file with the bearer token that "+what+" requests must bring; needed to listen on other than loopback")
	f.StringVar(&s.cert, "http-cert", "", "certificate file (PEM) with which to serve "+what+" over TLS")
	f.StringVar(&s.key, "http-key", "", "its key")
	return s
}

// Check reads what the flags name. listen has where HTTP is served, by flag. A port that is not on loopback must have a
// token: what it answers tells of prompts, and it takes commands.
func (s *HTTPSecurity) Check(listen map[string]string) error {
	var errs []error
	if (s.cert == "") != (s.key == "") {
		errs = append(errs, errors.New("--http-cert and --http-key go together"))
	} else if s.cert != "" {
		pair, err := tls.LoadX509KeyPair(s.cert, s.key)
		if err != nil {
			errs = append(errs, fmt.Errorf("--http-cert, --http-key: %w", err))
		}
		s.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	}
	if s.tokenFile != "" {
		text, err := os.ReadFile(s.tokenFile)
		s.Token = bytes.TrimSpace(text)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("--http-token-file: %w", err))
		case len(s.Token) < 16:
			errs = append(errs, fmt.Errorf("--http-token-file %s: a token of %d bytes is too short; use at least 16",
				s.tokenFile, len(s.Token)))
		}
	}
	for _, flag := range slices.Sorted(maps.Keys(listen)) {
		host, _, err := net.SplitHostPort(listen[flag])
		if err == nil && s.tokenFile == "" && !OnLoopback(host) {
			errs = append(errs, fmt.Errorf(
				"%s %s can be reached from other hosts: give --http-token-file, or listen on 127.0.0.1", flag, listen[flag]))
		}
	}
	return errors.Join(errs...)
}

package main

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"

	"github.com/kvatlas/kvatlas/internal/cli"
)

// httpSecurity is how the HTTP port is kept to those who may use it.
type httpSecurity struct {
	tokenFile, cert, key string

	token []byte
	tls   *tls.Config
}

// check reads what the flags name. listen has where HTTP is served, by flag. A port that is not on loopback must have a
// token: what it answers tells of prompts, and it takes commands.
func (s *httpSecurity) check(listen map[string]string) error {
	var errs []error
	if (s.cert == "") != (s.key == "") {
		errs = append(errs, errors.New("--http-cert and --http-key go together"))
	} else if s.cert != "" {
		pair, err := tls.LoadX509KeyPair(s.cert, s.key)
		if err != nil {
			errs = append(errs, fmt.Errorf("--http-cert, --http-key: %w", err))
		}
		s.tls = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	}
	if s.tokenFile != "" {
		text, err := os.ReadFile(s.tokenFile)
		s.token = bytes.TrimSpace(text)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("--http-token-file: %w", err))
		case len(s.token) < 16:
			errs = append(errs, fmt.Errorf("--http-token-file %s: a token of %d bytes is too short; use at least 16",
				s.tokenFile, len(s.token)))
		}
	}
	for _, flag := range slices.Sorted(maps.Keys(listen)) {
		host, _, err := net.SplitHostPort(listen[flag])
		if err == nil && s.tokenFile == "" && !cli.OnLoopback(host) {
			errs = append(errs, fmt.Errorf(
				"%s %s can be reached from other hosts: give --http-token-file, or listen on 127.0.0.1", flag, listen[flag]))
		}
	}
	return errors.Join(errs...)
}

package cli

import (
	"os"
	"path/filepath"
	"testing"
)

// TestHTTPSecurity: a port that others can reach needs a token.
func TestHTTPSecurity(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for listen, good := range map[string]bool{"127.0.0.1:0": true, "[::1]:0": true, "localhost:0": true, "": true,
		":0": false, "0.0.0.0:0": false, "[::]:0": false, "10.0.0.1:0": false} {
		if err := (&HTTPSecurity{}).Check(map[string]string{"--http-listen": listen}); (err == nil) != good {
			t.Errorf("%q without a token: %v", listen, err)
		}
		if err := (&HTTPSecurity{tokenFile: file}).Check(map[string]string{"--http-listen": listen}); err != nil {
			t.Errorf("%q with a token: %v", listen, err)
		}
	}
	for name, s := range map[string]*HTTPSecurity{
		"half a pair": {cert: "x"}, "no such pair": {cert: "x", key: "y"}, "no such token": {tokenFile: "/nonexistent"},
	} {
		if s.Check(map[string]string{"--http-listen": "127.0.0.1:0"}) == nil {
			t.Errorf("%s is taken", name)
		}
	}
	s := &HTTPSecurity{tokenFile: file}
	if err := s.Check(map[string]string{"--http-listen": ":0"}); err != nil {
		t.Fatal(err)
	}
	if string(s.Token) != "0123456789abcdef" {
		t.Errorf("the token is read as %q", s.Token)
	}
}

package cli

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/kvatlas/kvatlas/internal/edge/rights"
)

// TestHTTPSecurity: a port that other hosts can reach needs tokens.
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
	if s.Tokens.Of("Bearer 0123456789abcdef") != rights.Any || s.Tokens.Of("Bearer 0123456789abcdeX") != 0 {
		t.Error("the token differs from the file's token")
	}
	if list := s.ClearText(); len(list) != 1 || list[0] != "--http-listen :0" {
		t.Errorf("tokens cross the network in clear text on %q", list)
	}
}

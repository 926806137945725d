package launch

import "testing"

func TestOpenToOthers(t *testing.T) {
	for addr, want := range map[string]bool{"127.0.0.1:4222": false, "[::1]:4222": false, "": false, "[::]:4222": true,
		"0.0.0.0:4222": true, "10.1.2.3:4222": true} {
		if openToOthers(addr) != want {
			t.Errorf("%q: %v", addr, !want)
		}
	}
}

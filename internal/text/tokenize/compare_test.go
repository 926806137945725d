package tokenize

import "testing"

// TestVerdicts checks the verdict of each kind of comparison.
func TestVerdicts(t *testing.T) {
	ok := OK
	for want, c := range map[string]Comparison{
		"same":                    {Here: ok, There: ok},
		"DIFFERS from token 3 on": {Here: ok, There: ok, Differs: true, At: 3},
		"refused here":            {Here: Refused, There: ok},
		"refused there":           {Here: ok, There: Refused},
		"NOT COMPARED":            {Here: ok, There: Unavailable},
	} {
		if got := c.Verdict(); got != want {
			t.Errorf("%q, not %q", got, want)
		}
	}
}

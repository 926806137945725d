package hooks

import (
	"errors"
	"testing"
)

func TestFill(t *testing.T) {
	calls := 0
	h := struct {
		Set    func(n int)
		Unset  func(string, ...any)
		Answer func() (int, error)
		Limit  int
	}{Set: func(n int) { calls += n }, Limit: 7}
	Fill(&h)
	h.Set(2)
	h.Unset("a", 1, errors.ErrUnsupported)
	if n, err := h.Answer(); n != 0 || err != nil || calls != 2 || h.Limit != 7 {
		t.Errorf("answer %d %v, %d calls, limit %d", n, err, calls, h.Limit)
	}
}

package registry

import (
	"fmt"
	"testing"
)

// TestUnknownModelsAreNotRemembered: what is asked of models that nobody has takes no memory.
func TestUnknownModelsAreNotRemembered(t *testing.T) {
	r := &Registry{}
	for i := range 100 {
		model := fmt.Sprint("m", i)
		r.Sharing(model)
		r.Partitions(model)
	}
	n := 0
	count := func(_, _ any) bool { n++; return true }
	r.shared.Range(count)
	r.serving.Range(count)
	if n > 0 {
		t.Errorf("%d models are remembered", n)
	}
}

package pyenv

import "testing"

// Dynamo is a running integration/python/dynamo_library.py, where its commands are explained: NVIDIA Dynamo's own
// library.
type Dynamo struct{ driver }

// StartDynamo starts one that lives until the test ends.
func StartDynamo(t testing.TB) *Dynamo {
	t.Helper()
	d := &Dynamo{startDriver(t, PythonWith(t, "dynamo.txt"), "dynamo_library.py", struct{}{})}
	d.answer(nil)
	return d
}

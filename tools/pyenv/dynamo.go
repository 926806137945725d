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

// DynamoWorkers is a running integration/python/dynamo_workers.py, where its commands are explained: a process of
// Dynamo's runtime with publishers of KV-cache events.
type DynamoWorkers struct {
	driver
	Worker string // its id
}

// StartDynamoWorkers starts one that lives until the test ends, with the folder of file discovery or the URL of etcd.
func StartDynamoWorkers(t testing.TB, discovery string, blockSize int) *DynamoWorkers {
	t.Helper()
	options := map[string]any{"discovery": discovery, "block_size": blockSize}
	d := &DynamoWorkers{driver: startDriver(t, PythonWith(t, "dynamo.txt"), "dynamo_workers.py", options)}
	d.answer(d)
	return d
}

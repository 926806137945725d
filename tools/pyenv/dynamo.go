package pyenv

import (
	"flag"
	"os"
	"regexp"
	"testing"
)

// dynamoRelease selects the release of NVIDIA Dynamo for the judges. dynamo-next.txt has the next release.
var dynamoRelease = flag.String("dynamo", "dynamo.txt",
	"requirements file in integration/python of the Dynamo to judge")

// PythonWithDynamo returns the path of an interpreter with the selected release of Dynamo.
func PythonWithDynamo(t testing.TB) string {
	t.Helper()
	return PythonWith(t, *dynamoRelease)
}

// DynamoVersion returns the selected release of Dynamo, such as 1.6.1.
func DynamoVersion(t testing.TB) string {
	t.Helper()
	text, err := os.ReadFile(Script(t, *dynamoRelease))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^ai-dynamo-runtime==(.+)$`).FindSubmatch(text)
	if m == nil {
		t.Fatalf("%s has no version of ai-dynamo-runtime", *dynamoRelease)
	}
	return string(m[1])
}

// Dynamo is a running integration/python/dynamo_library.py, with NVIDIA Dynamo's own library. The script documents the
// commands.
type Dynamo struct{ driver }

// StartDynamo starts a Dynamo that runs until the end of the test.
func StartDynamo(t testing.TB) *Dynamo {
	t.Helper()
	d := &Dynamo{startDriver(t, PythonWithDynamo(t), "dynamo_library.py", struct{}{})}
	d.answer(nil)
	return d
}

// DynamoWorkers is a running integration/python/dynamo_workers.py: a process of Dynamo's runtime with publishers of
// KV-cache events. The script documents the commands.
type DynamoWorkers struct {
	driver
	Worker string // the worker's id
}

// StartDynamoWorkers starts workers that run until the end of the test. discovery is the folder of file discovery or
// the URL of etcd. Events go over the NATS server, or over ZeroMQ if nats is empty.
func StartDynamoWorkers(t testing.TB, discovery, nats string, blockSize int) *DynamoWorkers {
	t.Helper()
	options := map[string]any{"discovery": discovery, "block_size": blockSize, "nats": nats}
	d := &DynamoWorkers{driver: startDriver(t, PythonWithDynamo(t), "dynamo_workers.py", options)}
	d.answer(d)
	return d
}

package pyenv

import (
	"flag"
	"os"
	"regexp"
	"testing"
)

// dynamoRelease is the release of NVIDIA Dynamo that judges run: the tests of a released one, and again those of the
// next one, whose requirements file is dynamo-next.txt.
var dynamoRelease = flag.String("dynamo", "dynamo.txt",
	"requirements file in integration/python of the Dynamo to judge")

// PythonWithDynamo returns the path of an interpreter that has the release of Dynamo that is judged.
func PythonWithDynamo(t testing.TB) string {
	t.Helper()
	return PythonWith(t, *dynamoRelease)
}

// DynamoVersion is the release of Dynamo that is judged, such as 1.6.1.
func DynamoVersion(t testing.TB) string {
	t.Helper()
	text, err := os.ReadFile(Script(t, *dynamoRelease))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^ai-dynamo-runtime==(.+)$`).FindSubmatch(text)
	if m == nil {
		t.Fatalf("%s does not say which release of ai-dynamo-runtime it has", *dynamoRelease)
	}
	return string(m[1])
}

// Dynamo is a running integration/python/dynamo_library.py, where its commands are explained: NVIDIA Dynamo's own
// library.
type Dynamo struct{ driver }

// StartDynamo starts one that lives until the test ends.
func StartDynamo(t testing.TB) *Dynamo {
	t.Helper()
	d := &Dynamo{startDriver(t, PythonWithDynamo(t), "dynamo_library.py", struct{}{})}
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
// The event plane is on the NATS server, or over ZeroMQ if nats is empty.
func StartDynamoWorkers(t testing.TB, discovery, nats string, blockSize int) *DynamoWorkers {
	t.Helper()
	options := map[string]any{"discovery": discovery, "block_size": blockSize, "nats": nats}
	d := &DynamoWorkers{driver: startDriver(t, PythonWithDynamo(t), "dynamo_workers.py", options)}
	d.answer(d)
	return d
}

//go:build judges

package torture

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/events"
	ours "github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// world is a deployment with its history: a NATS server with files, an indexer, and engines with shims.
type world struct {
	*stage
	natsAddr string
	nats     *daemon
	indexer  *daemon
	backup   string
	admin    *nats.Conn
}

// tortureServer is the server's configuration. The storage limit of the account is small, so a test can fill the
// storage.
const tortureServer = `
listen: %q
jetstream { store_dir: %q, max_file_store: 4GB, max_memory_store: 256MB }
accounts { KV { jetstream { max_file: 96MB, max_mem: 64MB }, users: [ { user: torture, password: torture } ] } }
no_auth_user: torture
`

const (
	logBytes    = 1 << 20 // of every partition: the least permitted size
	partitionsT = 2
)

func startWorld(t testing.TB, rng *rand.Rand, programs func(string) string, counters map[string]int) *world {
	w := &world{stage: newStage(t, counters), natsAddr: loopback.Reserve(t)}
	config := filepath.Join(w.dir, "nats.conf")
	text := fmt.Sprintf(tortureServer, w.natsAddr, filepath.Join(w.dir, "store"))
	if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	w.nats = w.daemon("nats-server", harness.Program(t, "nats-server"), nil, "-c", config)
	toNATS := func(who string) string { return "nats://" + w.proxy(who+"→nats", w.natsAddr).addr() }
	interval := []string{"200ms", "1s", "3s"}[rng.IntN(3)]
	w.indexer = w.daemon("indexer", programs("indexer"), func(code int, last string) bool {
		return code == 1 && strings.Contains(last, "not available")
	}, "serve", "--nats", toNATS("indexer"), "--http-listen", "127.0.0.1:0", "--partitions", fmt.Sprint(partitionsT),
		"--index-shards", fmt.Sprint(partitionsT), "--snapshot-interval", interval, "--log-bytes", fmt.Sprint(logBytes),
		"--pending-for", "24h", "--tombstone-for", "24h", "--log-level", "debug")
	w.servers, w.nodes = []*daemon{w.nats}, []*daemon{w.indexer}
	for i := range 2 {
		w.engine(i, rng, programs, toNATS)
	}
	var err error
	if w.admin, err = nats.Connect("nats://"+w.natsAddr, nats.MaxReconnects(-1),
		nats.ReconnectWait(20*time.Millisecond), nats.RetryOnFailedConnect(true)); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) end() {
	w.stage.end()
	w.admin.Close()
}

// stream looks at a partition's log, past everything of ours.
func (w *world) stream(ctx context.Context, p events.Partition) (jetstream.Stream, error) {
	js, err := jetstream.New(w.admin)
	if err != nil {
		return nil, err
	}
	return js.Stream(ctx, ours.Names("default").Stream(p))
}

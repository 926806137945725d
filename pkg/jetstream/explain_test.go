package jetstream

import (
	"bytes"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// lockedBuffer is a buffer for concurrent writes.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// TestWhatFollowsAKillIsExplained: the server's messages about the folder of a killed server are explained. The folder
// equals that of a server that was not stopped.
func TestWhatFollowsAKillIsExplained(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.publish(w.publisher(events.RankKey{Instance: "w"}), 1, 10)
	w.restart() // the server writes its state of the streams when it stops
	p := w.publisher(events.RankKey{Instance: "w"})
	w.publish(p, 11, 10)
	left := t.TempDir()
	if err := os.CopyFS(left, os.DirFS(w.dir)); err != nil {
		t.Fatal(err)
	}
	var said lockedBuffer
	srv := startServerWith(t, natsserver.Options{Dir: left, Logger: slog.New(slog.NewTextHandler(&said, nil))})
	found := false
	for line := range strings.Lines(said.String()) {
		if !strings.Contains(line, "level=WARN") || !strings.Contains(line, "tream state") {
			continue
		}
		found = found || strings.Contains(line, "Stream state outdated")
		if !strings.Contains(line, "what_to_do=nothing") || !strings.Contains(line, "loses nothing") {
			t.Errorf("not explained: %s", line)
		}
	}
	if !found {
		t.Errorf("nothing is outdated:\n%s", said.String())
	}
	ns, err := OpenNamespace(w.ctx, connect(t, ConnOptions{Server: srv}), "test")
	if err != nil {
		t.Fatal(err)
	}
	if info, err := ns.StreamInfo(w.ctx, 0); err != nil || info.Last != 20 || info.Messages != 20 {
		t.Errorf("of 20 messages there are %+v, %v", info, err)
	}
}

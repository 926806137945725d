//go:build judges

package page

import (
	"syscall"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
)

// TestFrozen: a node that has stopped, and whose connections are open, is not called live; the page says since when,
// and is live again when the node goes on.
func TestFrozen(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	b := open(t, "http://"+x.HTTP+"/", 1000, 700, false)
	live := "document.getElementById('live').textContent.startsWith('live') && document.getElementById('alert').hidden"
	b.await(live)
	b.await("document.body.innerText.includes('No workers yet')")
	signal(t, x.Process, syscall.SIGSTOP)
	b.await(`/^Not live since \d\d:\d\d:\d\d: The indexer has said nothing for \d+ seconds/.test(
		document.getElementById('alert').checkVisibility() && document.getElementById('alert').textContent)`)
	if chip := get[string](b, "document.getElementById('live').textContent"); chip != "not live" {
		t.Errorf("at its top the page says %q", chip)
	}
	b.faults("a frozen node")
	signal(t, x.Process, syscall.SIGCONT)
	b.await(live)
}

func signal(t *testing.T, p *harness.Process, s syscall.Signal) {
	t.Helper()
	if err := p.Cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

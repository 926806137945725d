//go:build judges

package page

import (
	"context"
	"fmt"
	"syscall"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestFrozen checks a stopped node with open connections. The page does not show the node as live, states the time
// since the stop, and shows the node as live again after the stop.
func TestFrozen(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	publish(t, x, "m")
	b := open(t, "http://"+x.HTTP+"/#/prefixes", 1000, 700, false)
	live := "document.getElementById('live').textContent.startsWith('live') && document.getElementById('alert').hidden"
	b.await(live)
	b.await("document.getElementById('icicle').dataset.runs === '1'")
	signal(t, x.Process, syscall.SIGSTOP)
	b.await(`/^Not live since \d\d:\d\d:\d\d: The indexer has sent nothing for \d+ seconds/.test(
		document.getElementById('alert').checkVisibility() && document.getElementById('alert').textContent)`)
	if chip := get[string](b, "document.getElementById('live').textContent"); chip != "not live" {
		t.Errorf("the top of the page has %q", chip)
	}
	b.faults("a frozen node")
	b.await("document.querySelector('#view .error').textContent.includes('does not answer')") // requested for the tree
	signal(t, x.Process, syscall.SIGCONT)
	b.await(live)
	b.await("!document.querySelector('#view .error').textContent")
}

// publish makes a worker of every model store a block.
func publish(t *testing.T, x *harness.Indexer, models ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), harness.Patience)
	defer cancel()
	ns := harness.OpenNamespace(t, ctx, x.NATS)
	for _, model := range models {
		stored := events.Event{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{1},
			Locals: []events.LocalHash{1}}
		harness.PublishAs(t, ctx, ns, events.WorkerID("of-"+model), &events.Batch{Incarnation: 1, FirstID: 1,
			Model: model, BlockSize: harness.BlockSize, Events: []events.Event{stored}})
	}
}

func signal(t *testing.T, p *harness.Process, s syscall.Signal) {
	t.Helper()
	if err := p.Cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// TestModelAway checks that the reader's selection stays while a restarted node lacks the model, and that the model is
// shown after the node has the model again.
func TestModelAway(t *testing.T) {
	t.Parallel()
	data := t.TempDir()
	x := harness.StartIndexer(t, data, "", "--node-id", "node-a")
	publish(t, x, "first", "second")
	b := open(t, "http://"+x.HTTP+"/", 1200, 800, false)
	selects := []struct{ view, id, choice string }{{"fleet", "fleet-model", "second"},
		{"prefixes", "prefix-model", "second"}, {"prefixes", "prefix-node", "node-a"},
		{"funnel", "funnel-model", "second"}, {"ask", "ask-model", "second"}}
	choose := func(id, choice string) {
		t.Helper()
		b.await(fmt.Sprintf("[...document.getElementById(%q).options].some(o => o.text === %q)", id, choice))
		b.do(chromedp.Evaluate(fmt.Sprintf(`(s => {
			s.value = [...s.options].find(o => o.text === %q).value;
			s.dispatchEvent(new Event("change"));
		})(document.getElementById(%q))`, choice, id), nil))
	}
	for _, s := range selects {
		b.view(s.view)
		choose(s.id, s.choice)
	}
	// shown waits until all selections are the reader's.
	shown := func(how string) {
		t.Helper()
		for _, s := range selects {
			b.view(s.view)
			b.await(fmt.Sprintf("document.getElementById(%q).selectedOptions[0].text === %q", s.id, s.choice+how))
		}
	}
	shown("")
	b.away.Store(true)
	x.Stop()
	empty := harness.StartIndexer(t, t.TempDir(), "", "--node-id", "node-b", "--http-listen", x.HTTP)
	shown(" (not there now)")
	b.faults("a missing model")
	empty.Stop()
	harness.StartIndexer(t, data, "", "--node-id", "node-a", "--http-listen", x.HTTP)
	shown("")
	b.view("prefixes")
	b.await("document.getElementById('icicle').dataset.runs === '1' && icicle.checkVisibility()")

	// If the last selected model cannot be loaded, the page must not show the tree of another model.
	b.do(chromedp.Evaluate("window.fetch = () => Promise.reject(new TypeError()); 0", nil))
	choose("prefix-model", "first")
	b.await("document.querySelector('#view .error').textContent.includes('does not answer')")
	b.await("!document.getElementById('icicle').checkVisibility()")
}

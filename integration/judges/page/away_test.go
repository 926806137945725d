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

// TestFrozen: a node that has stopped, and whose connections are open, is not called live; the page says since when,
// and is live again when the node goes on.
func TestFrozen(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	publish(t, x, "m")
	b := open(t, "http://"+x.HTTP+"/#/prefixes", 1000, 700, false)
	live := "document.getElementById('live').textContent.startsWith('live') && document.getElementById('alert').hidden"
	b.await(live)
	b.await("document.getElementById('icicle').dataset.runs === '1'")
	signal(t, x.Process, syscall.SIGSTOP)
	b.await(`/^Not live since \d\d:\d\d:\d\d: The indexer has said nothing for \d+ seconds/.test(
		document.getElementById('alert').checkVisibility() && document.getElementById('alert').textContent)`)
	if chip := get[string](b, "document.getElementById('live').textContent"); chip != "not live" {
		t.Errorf("at its top the page says %q", chip)
	}
	b.faults("a frozen node")
	b.await("document.querySelector('#view .error').textContent.includes('does not answer')") // asked for the tree
	signal(t, x.Process, syscall.SIGCONT)
	b.await(live)
	b.await("!document.querySelector('#view .error').textContent")
}

// publish has a worker of each model store a block.
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

// TestModelAway: what the reader has chosen stays chosen while a node that has just started lacks it, and is shown
// again when the node has it again.
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
	// shown awaits that in all selects is chosen what the reader has chosen.
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
	b.faults("a model that is not there")
	empty.Stop()
	harness.StartIndexer(t, data, "", "--node-id", "node-a", "--http-listen", x.HTTP)
	shown("")
	b.view("prefixes")
	b.await("document.getElementById('icicle').dataset.runs === '1' && icicle.checkVisibility()")

	// Where the model that was chosen last cannot be had, another one's tree is not shown as if it were its.
	b.do(chromedp.Evaluate("window.fetch = () => Promise.reject(new TypeError()); 0", nil))
	choose("prefix-model", "first")
	b.await("document.querySelector('#view .error').textContent.includes('does not answer')")
	b.await("!document.getElementById('icicle').checkVisibility()")
}

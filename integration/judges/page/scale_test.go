//go:build judges

package page

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/kvatlas/kvatlas/internal/page"
	"github.com/kvatlas/kvatlas/internal/watch"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// many is a fleet of simulated workers.
type many struct {
	mu   sync.Mutex
	list []api.WorkerInfo
}

func (m *many) Workers(context.Context, api.WorkersRequest) (*api.WorkerList, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return &api.WorkerList{Complete: true, Workers: append([]api.WorkerInfo(nil), m.list...)}, nil
}
func (m *many) Loads(context.Context) (*api.LoadList, error)          { return &api.LoadList{}, nil }
func (m *many) EngineLoads(context.Context) (*api.EngineLoads, error) { return &api.EngineLoads{}, nil }
func (m *many) Nodes() []string                                       { return nil }
func (m *many) StatusOf(context.Context, string) (*api.Status, error) { return &api.Status{}, nil }

// TestManyWorkers: with 10,000 workers in the stream there are no more elements than are seen, and a frame of scrolling
// and a change of the fleet touch no more than these; nothing is sorted by name again.
func TestManyWorkers(t *testing.T) {
	t.Parallel()
	const workers, most = 10_000, 1000
	source := &many{}
	for i := range workers {
		w := api.WorkerInfo{Model: "m", BlockSize: 16, Incarnation: 1}
		w.Instance = events.WorkerID(fmt.Sprintf("worker-%05d", i))
		w.Blocks.Device = uint64(1000 + i%997)
		source.list = append(source.list, w)
	}
	hub := watch.New(watch.Config{Self: "a", Source: source, Fleet: 200 * time.Millisecond})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); hub.Run(ctx) }()
	mux := http.NewServeMux()
	page.Register(mux)
	mux.HandleFunc("/v1/watch", func(w http.ResponseWriter, r *http.Request) {
		_ = hub.Watch(r.Context(), func(event []byte) error {
			if _, err := w.Write(event); err != nil {
				return err
			}
			return http.NewResponseController(w).Flush()
		})
	})
	server := httptest.NewServer(mux)
	t.Cleanup(func() { cancel(); <-ended; server.Close() })
	b := open(t, server.URL+"/#/fleet", 1600, 1000, false)
	b.await(fmt.Sprintf("document.querySelector('.grid').getAttribute('aria-rowcount') == %d", workers+1))
	b.do(chromedp.Evaluate(`(() => {
		window.touched = window.compared = 0;
		new MutationObserver((list) => { touched = Math.max(touched, list.length); }).observe(document,
			{ subtree: true, childList: true, attributes: true, characterData: true });
		const own = Object.getOwnPropertyDescriptor(Intl.Collator.prototype, "compare").get;
		Object.defineProperty(Intl.Collator.prototype, "compare", { get() {
			const compare = own.call(this);
			return (a, b) => { compared++; return compare(a, b); };
		} });
	})()`, nil))
	// bounded fails if more was done at once than what is seen asks for.
	bounded := func(what string) {
		t.Helper()
		b.await("touched > 0")
		n := get[map[string]int](b, "({elements: document.querySelectorAll('*').length, touched, compared})")
		t.Logf("%s: %v", what, n)
		if n["elements"] > most || n["touched"] > most || n["compared"] > 0 {
			t.Errorf("%s: %v, want at most %d elements, as many touched at once, and no names compared", what, n, most)
		}
		b.do(chromedp.Evaluate("touched = 0", nil))
	}
	for _, part := range []float64{0.001, 0.002, 0.1, 0.5, 0.9, 1} {
		b.do(chromedp.Evaluate(fmt.Sprintf("(e => { e.scrollTop = %v * e.scrollHeight })(document.querySelector('.grid .body'))",
			part), nil))
		b.await("(top => [...document.querySelectorAll('.sheet .row:not([hidden])')].some(r => " +
			"r.getAttribute('aria-rowindex') - 2 === Math.floor(top / 36)))(document.querySelector('.grid .body').scrollTop)")
		bounded(fmt.Sprintf("scrolled to %v", part))
	}
	b.tabTo(".grid .body")
	b.press(kb.End)
	b.await(fmt.Sprintf("document.querySelector('.row.now .c-worker')?.textContent === 'worker-%05d'", workers-1))
	source.mu.Lock()
	source.list[workers-1].Blocks.Device = 777
	source.mu.Unlock()
	b.await("document.querySelector('.row.now .c-device').textContent === '777'")
	bounded("a change")
	b.do(chromedp.Click(".top .c-device button", chromedp.ByQuery))
	b.await("document.querySelector('.top .c-device').getAttribute('aria-sort') === 'descending'")
	bounded("another order")
}

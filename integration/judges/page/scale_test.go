//go:build judges

package page

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/performance"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/operate/watch"
	"github.com/kvatlas/kvatlas/internal/serve/page"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// many is a fleet of simulated workers.
type many struct {
	mu   sync.Mutex
	list []api.WorkerInfo
	err  error

	expired []api.ExpiredWorker
}

func (m *many) Workers(context.Context, api.WorkersRequest) (*api.WorkerList, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return &api.WorkerList{Complete: true, Workers: append([]api.WorkerInfo(nil), m.list...),
		Expired: m.expired}, m.err
}
func (m *many) Loads(context.Context) (*api.LoadList, error)          { return &api.LoadList{}, nil }
func (m *many) EngineLoads(context.Context) (*api.EngineLoads, error) { return &api.EngineLoads{}, nil }
func (m *many) Nodes() []string                                       { return nil }
func (m *many) StatusOf(context.Context, string) (*api.Status, error) { return &api.Status{}, nil }

// fleetOf serves the page with a fleet of simulated workers and an update interval.
func fleetOf(t *testing.T, workers int, every time.Duration) (source *many, url string) {
	t.Helper()
	source = &many{}
	for i := range workers {
		w := api.WorkerInfo{Model: "m", BlockSize: 16, Incarnation: 1}
		w.Instance = events.WorkerID(fmt.Sprintf("worker-%05d", i))
		w.Blocks.Device = uint64(1000 + i%997)
		source.list = append(source.list, w)
	}
	hub := watch.New(watch.Config{Self: "a", Source: source, Fleet: every})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); hub.Run(ctx) }()
	mux := web.NewMux()
	page.Register(mux)
	mux.Handle("/v1/watch", web.Rules{http.MethodGet: web.Reads}, func(w http.ResponseWriter, r *http.Request) {
		_ = hub.Watch(r.Context(), func(event []byte) error {
			if _, err := w.Write(event); err != nil {
				return err
			}
			return http.NewResponseController(w).Flush()
		})
	})
	server := httptest.NewServer(mux)
	t.Cleanup(func() { cancel(); <-ended; server.Close() })
	return source, server.URL + "/#/fleet"
}

// TestManyWorkers checks the page with 10,000 workers: only visible elements exist, a frame of scrolling and a change
// of the fleet touch only visible elements, and names are not sorted again.
func TestManyWorkers(t *testing.T) {
	t.Parallel()
	const workers, most = 10_000, 1000
	source, url := fleetOf(t, workers, 200*time.Millisecond)
	b := open(t, url, 1600, 1000, false)
	b.await(fmt.Sprintf("document.querySelector('.grid .body').getAttribute('aria-rowcount') == %d", workers+1))
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
	// bounded fails if a step changed more than the visible elements.
	bounded := func(what string) {
		t.Helper()
		b.await("touched > 0")
		n := get[map[string]int](b, "({elements: document.querySelectorAll('*').length, touched, compared})")
		t.Logf("%s: %v", what, n)
		if n["elements"] > most || n["touched"] > most || n["compared"] > 0 {
			t.Errorf("%s: %v, want at most %d elements, the same number of changes, and no comparison of names", what, n, most)
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

var frames = flag.Duration("frames", 0, "measure the frames of the fleet's view with 10,000 workers, for this time each")

// TestStates checks that the order by state puts the worst last, that D drains, that Ctrl+D stays with the browser, and
// that an unknown fleet is not shown as empty.
func TestStates(t *testing.T) {
	t.Parallel()
	source, url := fleetOf(t, 3, 200*time.Millisecond)
	source.list[0].Engine, source.list[0].Record = api.EngineConnected, &api.WorkerRecord{State: api.WorkerSchedulable}
	source.list[1].Engine = api.EngineGone
	source.list[2].CatchingUp = true
	b := open(t, url, 1600, 1000, false)
	b.await("document.querySelectorAll('.sheet .row').length === 3")
	b.do(chromedp.Click(".top .c-state button", chromedp.ByQuery))
	b.await(`[...document.querySelectorAll(".sheet .row")].sort((a, b) => a.ariaRowIndex - b.ariaRowIndex).map(
		(r) => r.querySelector(".c-state").textContent).join() === "schedulable,catching up,engine gone"`)
	b.tabTo(".grid .body")
	b.press(kb.Home)
	if get[bool](b, `!document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "d", ctrlKey: true,
		cancelable: true, bubbles: true })) || !!document.querySelector("dialog[open] .drain")`) {
		t.Error("the page handles Ctrl+D of the browser")
	}
	b.press("D")
	b.focused("dialog[open] .drain")
	b.press(kb.Escape)
	source.mu.Lock()
	source.err = api.Errorf(api.CodeUnavailable, "not now")
	source.mu.Unlock()
	b.await("document.querySelector('#view').innerText.includes('The state of the fleet is unavailable')")
	b.await("document.getElementById('alert').textContent.includes('not now')")
}

// TestFrames prints measurements without a judgement, because the figures depend on the machine.
func TestFrames(t *testing.T) {
	if *frames == 0 {
		t.Skip("measures only with -frames")
	}
	const workers = 10_000
	source, url := fleetOf(t, workers, time.Second)
	b := open(t, url, 1600, 1000, false)
	b.await(fmt.Sprintf("document.querySelector('.grid .body').getAttribute('aria-rowcount') == %d", workers+1))
	b.do(performance.Enable().WithTimeDomain(performance.EnableTimeDomainThreadTicks))
	used := func() (seconds float64) { // processor time of the page's thread
		b.do(chromedp.ActionFunc(func(ctx context.Context) error {
			metrics, err := performance.GetMetrics().Do(ctx)
			for _, m := range metrics {
				if m.Name == "TaskDuration" {
					seconds = m.Value
				}
			}
			return err
		}))
		return seconds
	}
	for _, changing := range []int{0, 500, workers} {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for every := time.NewTicker(time.Second); ; {
				source.mu.Lock()
				for i := range changing {
					source.list[i*workers/changing].Blocks.Device++
				}
				source.mu.Unlock()
				select {
				case <-every.C:
				case <-ctx.Done():
					every.Stop()
					return
				}
			}
		}()
		for _, move := range []int{0, 200} {
			before := used()
			b.do(chromedp.Evaluate(fmt.Sprintf(`(() => {
				window.took = [];
				window.long = [];
				new PerformanceObserver((list) => long.push(...list.getEntries().map((e) => e.duration)))
					.observe({ type: "longtask" });
				const body = document.querySelector(".grid .body");
				let last = performance.now(), way = %d;
				const end = last + %d;
				requestAnimationFrame(function next(now) {
					took.push(now - last);
					last = now;
					const to = body.scrollTop + way;
					if (to < 0 || to > body.scrollHeight - body.clientHeight) way = -way;
					body.scrollTop += way;
					if (now < end) requestAnimationFrame(next);
					else window.done = true;
				});
			})()`, move, frames.Milliseconds()), nil))
			b.await("window.done")
			of := get[map[string]float64](b, `(() => {
				delete window.done;
				took.sort((a, b) => a - b);
				const at = (part) => took[Math.min(took.length - 1, Math.floor(part * took.length))];
				return { frames: took.length, p50: at(0.5), p99: at(0.99), most: at(1), long: long.length,
					longest: Math.max(0, ...long) };
			})()`)
			t.Logf("%5d workers change a second, %3d pixels a frame: %4.0f frames, p50 %.1f ms, p99 %.1f ms, most %.1f ms; "+
				"%.0f tasks above 50 ms, longest %.0f ms; processor %.1f ms a frame", changing, move, of["frames"], of["p50"],
				of["p99"], of["most"], of["long"], of["longest"], 1000*(used()-before)/of["frames"])
		}
		cancel()
		<-ended
	}
}

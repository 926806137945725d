//go:build judges

package page

import (
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/whatif"
)

var pictures = flag.Bool("pictures", false, "write docs/pictures anew")

// living selects the rows of the fleet's workers that are not expired.
const living = ".sheet .row:not([hidden]):not([data-kind=gone])"

// asking is true when the view has the models.
const asking = "document.querySelector('#ask-model option[value*=m]')"

// views has all views, with an element that exists when the view has data.
var views = []struct{ name, there string }{
	{"fleet", fmt.Sprintf("document.querySelectorAll(`%s`).length === %d", living, engines+2)},
	{"prefixes", "document.getElementById('icicle')?.dataset.runs > 3"},
	{"funnel", "document.querySelector('.funnel')?.dataset.requests > 0"},
	{"cluster", "document.querySelectorAll('#partitions tbody tr').length === 8"},
	{"ask", asking},
	{"whatif", "document.getElementById('whatif-file')"},
}

// show opens a view and waits for the data. For ask, show sends a prompt, and for whatif, it opens a report.
func (b *browser) show(w *world, view string) {
	b.Helper()
	b.view(view)
	for _, v := range views {
		if v.name == view {
			b.await(v.there)
		}
	}
	switch view {
	case "ask":
		b.ask(w.tiered)
	case "whatif":
		b.open(w.report)
		b.await("document.getElementById('whatif-plot').dataset.bars == 8")
	}
}

// ask sends a prompt of tokens.
func (b *browser) ask(tokens []uint32) {
	b.Helper()
	b.await(asking)
	b.do(chromedp.SetValue("#ask-prompt", harness.JSONList(tokens), chromedp.ByID))
	b.do(chromedp.Click("form [type=submit]", chromedp.ByQuery))
	b.await("document.querySelector('#strips .strip') && document.querySelector('#costs')")
}

// TestFleet checks that the list has the API's data of every worker, and that the filter, the order and draining work.
func TestFleet(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	b := open(t, w.url("fleet"), 1600, 1000, false)
	b.await(views[0].there)
	type row struct{ Worker, Device, Host, Disk, External string }
	rows := func() []row {
		return get[[]row](b, `[...document.querySelectorAll('.sheet .row:not([hidden])')].sort((a, b) =>
			a.getAttribute('aria-rowindex') - b.getAttribute('aria-rowindex')).map(r => ({
			worker: r.querySelector('.c-worker').textContent, device: r.querySelector('.c-device').textContent,
			host: r.querySelector('.c-host').textContent, disk: r.querySelector('.c-disk').textContent,
			external: r.querySelector('.c-external').textContent}))`)
	}
	number := func(n uint64) string {
		if n == 0 {
			return "–"
		}
		return fmt.Sprint(n) // none has more than 999
	}
	var want []row
	for _, i := range w.workers(w.nodes[0]).Workers {
		want = append(want, row{string(i.Instance), number(i.Blocks.Device), number(i.Blocks.Host), number(i.Blocks.Disk),
			number(i.Blocks.External)})
	}
	if got := rows(); !slices.Equal(got, want) {
		t.Errorf("the page has\n%v, the API\n%v", got, want)
	}
	b.do(chromedp.Click(".top .c-device button", chromedp.ByQuery))
	slices.SortStableFunc(want, func(a, b row) int {
		var n, m int
		fmt.Sscan(a.Device, &n)
		fmt.Sscan(b.Device, &m)
		return m - n
	})
	if got := rows(); !slices.Equal(got, want) {
		t.Errorf("by blocks in device the page has\n%v, want\n%v", got, want)
	}
	b.do(chromedp.SendKeys("#fleet-search", "gpu-3", chromedp.ByID))
	b.await("document.querySelectorAll('.sheet .row:not([hidden])').length === 1")
	b.do(chromedp.Click(".sheet .row:not([hidden]) .c-act button", chromedp.ByQuery))
	b.await("document.querySelector('dialog[open] .drain') === document.activeElement")
	b.press(kb.Enter)
	b.await("document.querySelector('dialog[open] .drain').textContent.startsWith('Undrain')")
	for _, i := range w.workers(w.nodes[0]).Workers {
		if want := i.Instance == "gpu-3"; want != (i.Record != nil && i.Record.State == api.WorkerDraining) {
			t.Errorf("%s is %v", i.Instance, i.Record)
		}
	}
}

// TestExpired checks that a worker with an expired lease is shown after all other workers, with the time since the
// expiry, and is not counted. After a removal the worker is not shown.
func TestExpired(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.expire("a-gone")
	for _, width := range []int64{1600, 400} {
		b := open(t, w.url("fleet"), width, 1000, false)
		b.await(views[0].there)
		b.do(chromedp.Evaluate("document.querySelector('.top .c-worker button').click()", nil)) // the last name first
		b.await("document.querySelector('.sheet .row[aria-rowindex=\"2\"] .c-worker').textContent === 'tiers-2'")
		at := fmt.Sprintf(".sheet .row[aria-rowindex=%q]", fmt.Sprint(engines+4))
		said := get[[]string](b, fmt.Sprintf(`(r => [r.querySelector('.c-worker').textContent, r.dataset.kind,
			r.querySelector('.c-device').textContent, r.querySelector('.c-act button').checkVisibility() ? 'drain' : ''])(
			document.querySelector(%q))`, at))
		if !slices.Equal(said, []string{"a-gone", "gone", "–", ""}) {
			t.Errorf("the last row is %v", said)
		}
		mark := "document.querySelector(%q).querySelector('.c-state').textContent"
		if width < 600 {
			mark = "'expired' + document.querySelector(%q).dataset.ago"
			if content := get[string](b, fmt.Sprintf("getComputedStyle(document.querySelector(%q), '::before').content",
				at+" .c-worker > span")); !strings.HasPrefix(content, `"expired"`) && !strings.HasPrefix(content, `"expired `) {
				t.Errorf("the text beside the name is %s", content)
			}
		}
		b.await("/^expired \\d+ (s|min)$/.test(" + fmt.Sprintf(mark, at) + ")")
		tiles := get[map[string]string](b, `Object.fromEntries([...document.querySelectorAll('.tile')].map(
			e => [e.querySelector('dt').textContent, e.querySelector('dd').textContent]))`)
		if tiles["Workers"] != fmt.Sprintf("%d %d ranks", engines+2, engines+2) || tiles["Expired"] != "1 rank" ||
			tiles["Not well"] != "0 ranks" {
			t.Errorf("it counts %v", tiles)
		}
		if label := get[string](b, "document.querySelector('.map canvas').getAttribute('aria-label')"); !strings.HasPrefix(
			label, fmt.Sprintf("Blocks of %d ranks", engines+2)) {
			t.Errorf("the map is %s", label)
		}
		b.fits()
		b.whole(fmt.Sprint("an expired worker at ", width))
		b.faults(fmt.Sprint("an expired worker at ", width))
		b.do(chromedp.SetValue("#fleet-state", "expired", chromedp.ByID), chromedp.Evaluate(
			"document.querySelector('#fleet-state').dispatchEvent(new Event('change'))", nil))
		b.await("document.querySelectorAll('.sheet .row:not([hidden])').length === 1 && " +
			"!document.querySelector('.map canvas').checkVisibility()")
		b.tabTo(".grid .body")
		b.press(kb.Home, kb.Enter)
		b.await("document.querySelector('dialog[open]')?.textContent.includes('indexer workers remove a-gone')")
		b.whole("an expired worker's details")
		b.faults("an expired worker's details")
		b.press(kb.Escape)
		if width < 600 {
			if err := harness.HTTPDo(w.nodes[0], "DELETE", "/v1/workers/a-gone", nil, &api.Worker{}); err != nil {
				t.Fatal(err)
			}
			b.await("document.body.innerText.includes('No worker matches the filter')")
		}
	}
}

// TestKeyboard uses only the keyboard to change the theme, open a worker, drain and undrain the worker, and send a
// prompt.
func TestKeyboard(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	b := open(t, w.url("fleet"), 1200, 800, false)
	b.await(views[0].there)
	b.tabTo(".skip")
	b.press(kb.Enter)
	b.focused("#main")
	if at := get[string](b, "location.hash"); at != "#/fleet" {
		t.Errorf("the skip link leads to %s", at)
	}
	b.tabTo("#theme")
	b.press(kb.Enter, kb.Enter)
	if dark := get[string](b, "getComputedStyle(document.documentElement).colorScheme"); dark != "dark" {
		t.Errorf("after two changes the theme is %s", dark)
	}
	b.tabTo(".grid .body")
	b.press(kb.End, kb.Home, kb.ArrowDown)
	if at := get[string](b, "document.querySelector('.row.now .c-worker').textContent"); at != "gpu-2" {
		t.Errorf("the keys lead to %s", at)
	}
	b.press(kb.Enter)
	b.await("document.querySelector('dialog[open]')")
	b.tabTo("dialog .drain")
	b.press(kb.Enter)
	b.await("document.querySelector('dialog[open] .drain').textContent.startsWith('Undrain')")
	b.focused("dialog .drain")
	b.press(kb.Enter)
	b.await("document.querySelector('dialog[open] .drain').textContent.startsWith('Drain')")
	b.press(kb.Escape)
	b.await("!document.querySelector('dialog[open]') && document.activeElement.matches('.grid .body')")
	b.tabTo(".bar a[href='#/ask']")
	b.press(kb.Enter)
	b.await(asking)
	b.tabTo("#ask-prompt")
	b.do(chromedp.KeyEvent(harness.JSONList(w.tiered[:4*harness.BlockSize])))
	b.tabTo("form [type=submit]")
	b.press(kb.Enter)
	b.await("document.querySelectorAll('#strips .strip').length === " + fmt.Sprint(engines+2))
	b.focused("form [type=submit]")
	b.tabTo(".bar a[href='#/cluster']")
	b.press(kb.Enter)
	b.await("document.querySelectorAll('#partitions tbody tr').length === 8")
	b.tabTo("main .head button")
	b.press(kb.Enter)
	b.await("document.querySelectorAll('#partitions .chip.good').length === 8")
	b.focused("main .head button")
}

// TestAsk compares the strips with the depths of find, and the costs with select.
func TestAsk(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	b := open(t, w.url("ask"), 1200, 900, false)
	for _, prompt := range [][]uint32{w.tiered, w.system, harness.Tokens(900_000, 64)} {
		b.await(asking)
		b.do(chromedp.Evaluate("document.getElementById('strips')?.remove()", nil))
		b.ask(prompt)
		var found api.Answer
		query := map[string]any{"model": "m", "tokens": prompt, "explain": true}
		if err := harness.HTTPDo(w.nodes[0], "POST", "/v1/find", query, &found); err != nil {
			t.Fatal(err)
		}
		type strip struct {
			Worker string
			Depth  string
		}
		var want []strip
		for _, o := range found.Workers {
			want = append(want, strip{string(o.Instance), fmt.Sprint(o.Total())})
		}
		got := get[[]strip](b, "[...document.querySelectorAll('#strips .strip')].map(s => "+
			"({worker: s.dataset.worker, depth: s.dataset.depth}))")
		if !slices.Equal(got, want) {
			t.Errorf("the page has\n%v, the API\n%v", got, want)
		}
		var chosen api.Selection
		query["advisory"] = true
		if err := harness.HTTPDo(w.nodes[0], "POST", "/v1/select", query, &chosen); err != nil {
			t.Fatal(err)
		}
		costs := map[string]string{}
		for _, c := range chosen.Explanation.Candidates {
			costs[string(c.Worker)] = strings.TrimRight(strings.TrimRight(fmt.Sprintf("%.3f", c.Cost), "0"), ".")
		}
		shown := get[map[string]string](b, "Object.fromEntries([...document.querySelectorAll('#costs tbody tr')].map("+
			"r => [r.cells[0].firstChild.textContent, r.cells[1].textContent]))")
		if fmt.Sprint(shown) != fmt.Sprint(costs) {
			t.Errorf("the page has costs\n%v, the API\n%v", shown, costs)
		}
	}

	// The element under the pointer belongs to another answer now, without a tip at this place.
	b.ask(w.tiered)
	b.await("document.querySelector('#strips .track i')")
	at := get[struct{ X, Y float64 }](b, "document.querySelector('#strips .track i').getBoundingClientRect()")
	b.do(chromedp.MouseEvent(input.MouseMoved, at.X+2, at.Y+2))
	b.await("document.querySelector('.tip:not([hidden])')")
	b.do(chromedp.SetValue("#ask-prompt", harness.JSONList(harness.Tokens(900_000, 64)), chromedp.ByID),
		chromedp.Evaluate("document.querySelector('#view form').requestSubmit()", nil))
	b.await("document.querySelector('#strips .strip') && !document.querySelector('#strips .track i')")
	if tip := get[string](b, "document.querySelector('.tip:not([hidden])')?.textContent || ''"); tip != "" {
		t.Errorf("the pointer shows the removed tip %q", tip)
	}
	var load api.LoadList
	w.get(w.nodes[0], "/v1/loads", &load)
	for _, m := range load.Models {
		if m.Requests > 0 {
			t.Errorf("asking booked %v", m)
		}
	}
}

// TestRecorded checks that recorded requests are listed as in the API, page by page, and shows a request with find's
// answer for its hashes, using only the keyboard.
func TestRecorded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.traffic(0)
	w.traffic(1)
	b := open(t, w.url("ask"), 1200, 900, false)
	b.await(asking)
	b.tabTo(".recorded summary")
	b.press(kb.Enter)
	b.await("document.querySelectorAll('#recorded tbody tr').length === 10")
	recorded := func(node string, q api.RecordedRequest) (list api.RecordedList) {
		t.Helper()
		if err := harness.HTTPDo(node, "POST", "/v1/recorded", q, &list); err != nil {
			t.Fatal(err)
		}
		return list
	}
	all := recorded(w.nodes[1], api.RecordedRequest{Model: "m", Limit: 100})
	if len(all.Requests) != 20 || all.More {
		t.Fatalf("%+v", all)
	}
	listed := func(want []api.Recorded) {
		t.Helper()
		type row struct{ ID, Blocks, Held, Worker string }
		var list []row
		for _, r := range want {
			worker := string(r.Worker)
			if worker == "" {
				worker = "–"
			}
			list = append(list, row{r.ID, fmt.Sprint(r.Blocks), fmt.Sprint(r.Held), worker})
		}
		got := get[[]row](b, `[...document.querySelectorAll('#recorded tbody tr')].map(r => ({id: r.dataset.id,
			blocks: r.cells[2].textContent, held: r.cells[3].textContent, worker: r.cells[4].textContent}))`)
		if !slices.Equal(got, list) {
			t.Errorf("the page has\n%v, the API\n%v", got, list)
		}
	}
	listed(all.Requests[:10])
	b.faults("recorded requests")
	b.tabTo(".recorded .older")
	b.press(kb.Enter)
	b.await(fmt.Sprintf("document.querySelector('#recorded tbody tr')?.dataset.id === %q", all.Requests[10].ID))
	listed(all.Requests[10:])
	b.focused(".recorded .fields button")
	at := slices.IndexFunc(all.Requests, func(r api.Recorded) bool { return r.RequestID == "request-1" })
	if at < 10 {
		t.Fatalf("request-1 is the %dth", at)
	}
	b.tabTo(fmt.Sprintf("[data-id=%q] button", all.Requests[at].ID))
	b.press(kb.Enter)
	b.await("document.querySelector('#recorded-as')?.textContent.startsWith('Request request-1,')")
	b.await("document.querySelector('#costs')")
	b.focused(fmt.Sprintf("[data-id=%q] button", all.Requests[at].ID))
	one := recorded(w.nodes[2], api.RecordedRequest{Model: "m", ID: all.Requests[at].ID})
	query := map[string]any{"model": "m", "hashes": one.Requests[0].Hashes, "explain": true}
	var found api.Answer
	if err := harness.HTTPDo(w.nodes[0], "POST", "/v1/find", query, &found); err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, o := range found.Workers {
		want = append(want, fmt.Sprint(o.Instance, " ", o.Total()))
	}
	got := get[[]string](b,
		"[...document.querySelectorAll('#strips .strip')].map(s => s.dataset.worker + ' ' + s.dataset.depth)")
	if !slices.Equal(got, want) || found.Workers[0].Total() == 0 {
		t.Errorf("the page has %v, the API %v", got, want)
	}
	b.fits()
	b.faults("a recorded request")

	// A failed request can be repeated.
	b.do(chromedp.Evaluate("window.original = fetch; window.fetch = () => Promise.reject(new TypeError()); 0", nil))
	b.tabTo(".recorded .fields button")
	b.press(kb.Enter)
	b.await("document.querySelector('.recorded .error')?.textContent.includes('does not answer')")
	b.focused(".recorded .fields button")
	b.do(chromedp.Evaluate("window.fetch = original; 0", nil))
	b.press(kb.Enter)
	b.await("document.querySelectorAll('#recorded tbody tr').length === 10")
}

// TestPrefixes checks that the icicle has the API's runs, and that the keyboard zooms to the run with the most holders.
func TestPrefixes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	b := open(t, w.url("prefixes"), 1200, 900, false)
	b.await("document.getElementById('icicle')?.dataset.runs > 3")
	var tree api.PrefixTree
	if err := harness.HTTPDo(w.nodes[0], "POST", "/v1/prefixes", map[string]any{"model": "m"}, &tree); err != nil {
		t.Fatal(err)
	}
	blocks, most := 0, 0
	for _, r := range tree.Runs {
		blocks += int(r.Blocks)
		most = max(most, r.Holders)
	}
	if int64(blocks) != tree.TotalBlocks || int64(len(tree.Runs)) != tree.TotalRuns || tree.Ranks != engines+2 {
		t.Errorf("%d blocks in %d runs of %+v", blocks, len(tree.Runs), tree)
	}
	if got := get[[]string](b, "[icicle.dataset.runs, icicle.dataset.blocks]"); !slices.Equal(got,
		[]string{fmt.Sprint(len(tree.Runs)), fmt.Sprint(blocks)}) {
		t.Errorf("the page has %v runs and blocks, the API %d and %d", got, len(tree.Runs), blocks)
	}
	b.tabTo("#icicle")
	b.press(kb.ArrowDown)
	b.await(fmt.Sprintf("document.getElementById('icicle-now').textContent.includes('held by %d ')", most))
	b.press(kb.Enter)
	b.await("document.querySelectorAll('.crumbs button').length === 2")
	b.press(kb.Escape)
	b.await("document.querySelectorAll('.crumbs button').length === 1")
	at := func() (s string) {
		return get[string](b, "[...document.querySelectorAll('.crumbs button')].at(-1).textContent + ': ' + "+
			"document.getElementById('icicle-now').textContent")
	}
	b.press(kb.ArrowDown, kb.ArrowDown, kb.Enter)
	b.await("document.querySelectorAll('.crumbs button').length === 4")
	if name, now, _ := strings.Cut(at(), ": "); !strings.Contains(now, ", first "+name) {
		t.Errorf("zoomed to %s, the keyboard is at %s", name, now)
	}
	b.press(kb.ArrowRight) // out of the zoomed run, which then disappears
	if n := get[int](b, "document.querySelectorAll('.crumbs button').length"); n != 3 {
		t.Errorf("%d crumbs beside the zoomed run", n)
	}
	b.do(chromedp.Click(".crumbs button", chromedp.ByQuery))
	b.focused("#icicle")

	// The page leaves the browser's own keys to the browser.
	before := get[string](b, "document.getElementById('icicle-now').textContent")
	taken := get[bool](b, `[["ArrowDown", "altKey"], ["Home", "ctrlKey"], ["ArrowLeft", "metaKey"]].some(([key, held]) =>
		!icicle.dispatchEvent(new KeyboardEvent("keydown", { key, [held]: true, cancelable: true, bubbles: true })))`)
	if after := get[string](b, "document.getElementById('icicle-now').textContent"); taken || after != before {
		t.Error("the icicle handles keys of the browser")
	}

	// The pointer shows the run under the pointer, also after a change of the run.
	area := get[struct{ X, Y, Width float64 }](b, "icicle.getBoundingClientRect()")
	tip := func() string { return get[string](b, "document.querySelector('.tip:not([hidden])').textContent") }
	b.do(chromedp.MouseEvent(input.MouseMoved, area.X+10, area.Y+45))
	second := tip()
	b.do(chromedp.MouseClickXY(area.X+10, area.Y+15))
	b.do(chromedp.MouseEvent(input.MouseMoved, area.X+10, area.Y+15))
	first := tip()
	if first == second || !strings.Contains(first, fmt.Sprintf("held by %d ranks in device: ", most)) {
		t.Errorf("the pointer shows %q, and right of the run %q", first, second)
	}
	b.do(chromedp.MouseClickXY(area.X+10, area.Y+45))
	b.await("document.querySelectorAll('.crumbs button').length === 3")
	if now := tip(); now != second { // the run is at the place of the first run
		t.Errorf("after a zoom to %q the pointer shows %q", second, now)
	}
}

// TestFunnel checks that the funnel has the API's numbers and a remedy for every cause, using only the keyboard.
func TestFunnel(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	b := open(t, w.url("funnel"), 1200, 900, false)
	b.await("document.body.innerText.includes('No requests for m')")
	b.fits()
	b.faults("a funnel of nothing")
	compare := func() {
		t.Helper()
		var f api.Funnel
		w.get(w.nodes[0], "/v1/funnel?model=m&since=1h", &f)
		b.await(fmt.Sprintf("document.querySelector('.funnel').dataset.requests == %d", f.Requests))
		type line struct {
			Name   string
			Tokens uint64
			Share  float64
		}
		got := get[[]line](b, `[...document.querySelectorAll('.funnel [data-cause], .funnel .step')].map(e => ({
			name: e.dataset.cause || e.parentElement.dataset.step,
			tokens: Number(e.querySelector('.tokens').textContent.replaceAll(',', '')),
			share: parseFloat(e.querySelector('.part-of').textContent)}))`)
		var want []line
		for _, s := range f.Steps {
			for _, l := range s.Lost {
				want = append(want, line{string(l.Cause), l.Tokens, 100 * l.Share})
			}
			if s.Share == nil {
				t.Fatalf("%s: nothing was reported", s.Step)
			}
			want = append(want, line{string(s.Step), s.Tokens, 100 * *s.Share})
		}
		if !slices.EqualFunc(got, want, func(a, b line) bool {
			return a.Name == b.Name && a.Tokens == b.Tokens && math.Abs(a.Share-b.Share) < 0.06
		}) {
			t.Errorf("the page has\n%v, the API\n%v", got, want)
		}
		drawn := get[[]string](b, "[...document.querySelectorAll('#funnel-time')].flatMap(c => [c.dataset.asked, c.dataset.reused])")
		if want := []string{fmt.Sprint(f.Steps[0].Tokens), fmt.Sprint(f.Steps[4].Tokens)}; !slices.Equal(drawn, want) {
			t.Errorf("the chart has %v tokens, the API %v", drawn, want)
		}
		if f.Steps[4].Tokens == 0 || len(f.Missing) > 0 {
			t.Errorf("nothing is looked at: %+v", f)
		}
	}
	w.traffic(0)
	b.tabTo("#funnel-since")
	b.press(kb.End)
	b.await("document.getElementById('funnel-since').value === '1h' && document.querySelector('.funnel').dataset.requests > 0")
	compare()
	b.tabTo("[data-cause=evicted] summary")
	b.press(kb.Enter)
	b.await("document.querySelector('details[open] .remedy')?.innerText.includes('By tiers-2 (device)')")
	b.faults("a cause")
	w.traffic(1)
	compare()
	if !get[bool](b, "document.activeElement.matches('[data-cause=evicted] details[open] summary')") {
		t.Error("with new numbers the cause is closed, or the focus is lost")
	}
	b.tabTo("#funnel-time")
	b.press(kb.Home)
	b.await("document.getElementById('funnel-now').textContent.includes(' request')")

	var c api.Capacity
	w.get(w.nodes[0], "/v1/capacity?model=m", &c)
	if len(c.Points) == 0 || len(c.Advice) == 0 {
		t.Fatalf("no curve is looked at: %+v", c)
	}
	b.do(chromedp.Reload()) // the page requests the curve once a minute
	b.await(fmt.Sprintf("document.querySelector('[data-points]')?.dataset.points == %d", len(c.Points)))
	b.tabTo("#capacity-plot")
	b.press(kb.End)
	last := c.Points[len(c.Points)-1]
	b.await(fmt.Sprintf("document.getElementById('capacity-now').textContent.replaceAll(',', '').startsWith('%d blocks: %.1f%%')",
		last.Blocks, 100*last.Shared))
	if got := get[[]string](b, "[...document.querySelectorAll('.advice li')].map(e => e.textContent)"); !slices.Equal(got, c.Advice) {
		t.Errorf("the page advises %q, the API %q", got, c.Advice)
	}
	b.fits()
	b.faults("a curve")

	// A node with a long uptime: a bar is longer than a minute, and a time of another day has a date.
	b.do(chromedp.Evaluate(`(() => {
		const original = fetch;
		window.fetch = async (path, options) => {
			const reply = await original(path, options);
			if (!path.includes("v1/funnel")) return reply;
			const f = await reply.json();
			f.from = new Date(Date.parse(f.to) - 3605_000);
			f.nodes[0].history_from = "2026-01-02T12:00:00Z";
			return new Response(JSON.stringify(f));
		};
	})()`, nil))
	b.await("document.querySelector('main').innerText.includes('each bar is 70 seconds')")
	b.await("/^(1|2|3) Jan, /.test(document.querySelector('.basis tbody tr').cells[2].textContent)")
}

// TestCluster compares nodes and partitions with the nodes' own statuses, and checks the comparison of replicas.
func TestCluster(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	b := open(t, w.url("cluster"), 1600, 1000, false)
	b.await("[...document.querySelectorAll('main table')[0]?.tBodies[0].rows || []].filter(" +
		"r => r.textContent.includes('ready')).length === 3")
	if got := get[[]string](b, `(() => { const t = document.querySelector('main table');
		const at = [...t.tHead.rows[0].cells].findIndex((c) => c.textContent === 'Zone');
		return [...t.tBodies[0].rows].map((r) => r.cells[at]?.textContent) })()`); !slices.Equal(got,
		[]string{zones[0], zones[1], "–"}) {
		t.Errorf("zones of the nodes: %q", got)
	}
	serving := map[string]string{}
	for _, node := range w.nodes {
		var s api.Status
		w.get(node, "/v1/status", &s)
		for _, p := range s.Partitions {
			serving[fmt.Sprint(p.Partition)] += s.Node + " "
		}
	}
	got := get[map[string]string](b, `(() => { const t = document.getElementById('partitions');
		return Object.fromEntries([...t.tBodies[0].rows].map(r => [r.cells[0].textContent, [...r.cells].map((c, i) =>
			c.textContent.startsWith('serving') ? t.tHead.rows[0].cells[i].textContent + ' ' : '').join('')])) })()`)
	if fmt.Sprint(got) != fmt.Sprint(serving) {
		t.Errorf("the page has %v, the nodes have %v", got, serving)
	}
	compare(b)
	b.await("document.querySelectorAll('#partitions .chip.good').length === 8")
}

// TestOneReplica checks that a partition with a single replica is not shown as equal, because no other replica exists
// for a comparison.
func TestOneReplica(t *testing.T) {
	t.Parallel()
	nats, address := harness.StartNATS(t), ""
	for _, id := range []string{"node-a", "node-b"} {
		n := harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", id,
			"--partition-replicas", "1", "--partitions", "4",
			"--http-listen", "127.0.0.1:0")
		address = n.WaitFor(`HTTP is served" listen=(\S+)`)[1]
	}
	settled(t, nats, 2, 4)
	b := open(t, "http://"+address+"/#/cluster", 1200, 800, false)
	b.await(`(t => t && t.tHead.rows[0].cells.length === 7 && t.tBodies[0].rows.length === 4 && [...t.tBodies[0].rows].every(
		(r) => r.textContent.split("serving").length === 2))(document.getElementById("partitions"))`)
	compare(b)
	b.await("document.querySelector('#partitions thead').textContent.includes(' ago')")
	if n := get[int](b, "document.querySelectorAll('#partitions .chip').length"); n > 0 {
		t.Errorf("%d partitions with a single replica are shown as equal or unequal", n)
	}
}

// compare has replicas compared.
func compare(b *browser) {
	b.Helper()
	b.do(chromedp.Evaluate("[...document.querySelectorAll('button')].find("+
		"b => b.textContent.startsWith('Compare')).click()", nil))
}

// TestToken checks that the page shows nothing without the token, that the form accepts the token, and that the address
// never contains the token.
func TestToken(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("0123456789abcdef0123\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	x := harness.StartIndexer(t, t.TempDir(), "", "--http-token-file", file)
	b := open(t, "http://"+x.HTTP+"/", 1000, 700, false)
	b.await("document.querySelector('#gate[open]')")
	b.faults("token")
	b.press(kb.Escape, kb.Escape) // without the token there is nothing to see
	b.await("document.querySelector('#gate[open]')")
	b.do(chromedp.SendKeys("#gate-token", "0123456789abcdef0123…"+kb.Enter, chromedp.ByID)) // invalid in a header
	b.await("document.getElementById('gate-error').textContent.includes('rejects')")
	b.do(chromedp.Evaluate("document.getElementById('gate-error').textContent = ''", nil))
	b.do(chromedp.SendKeys("#gate-token", "wrong"+kb.Enter, chromedp.ByID))
	b.await("document.getElementById('gate-error').textContent.includes('rejects')")
	b.do(chromedp.SendKeys("#gate-token", "0123456789abcdef0123"+kb.Enter, chromedp.ByID))
	b.await("document.getElementById('live').textContent.startsWith('live') && " +
		"document.body.innerText.includes('No workers yet')")
	if at := get[string](b, "location.href"); strings.Contains(at, "0123") {
		t.Errorf("the address is %s", at)
	}
	b.faults("no workers")
	b.do(chromedp.Navigate("http://" + x.HTTP + "/#/cluster"))
	b.await("document.querySelector('main table')?.tBodies[0].rows.length === 1")
	if got := get[string](b, "document.querySelector('main table').tHead.textContent"); strings.Contains(got, "Zone") {
		t.Errorf("a node without a zone has the columns %s", got)
	}
}

// TestLooks checks every view, light and dark, wide and narrow: the view fits the window, cuts no text and has no
// serious fault of axe-core. The widths without a picture are the widths at which a layout has the least room.
func TestLooks(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, w.report = predicted(t, whatif.Changes{Workers: 2})
	drain := map[string]any{"drain": true, "why": "the host is repaired"}
	if err := harness.HTTPDo(w.nodes[0], "PATCH", "/v1/workers/gpu-2", drain, &api.Worker{}); err != nil {
		t.Fatal(err)
	}
	w.expire("gpu-0")
	w.traffic(0)
	for round := 1; *pictures && round < 9; round++ {
		time.Sleep(10 * time.Second) // the picture shows a bar for every second
		w.traffic(round)
	}
	for _, look := range []struct {
		name          string
		width, height int64
		dark          bool
	}{{"light", 1400, 900, false}, {"dark", 1400, 900, true}, {"400", 400, 860, false}, {"400-dark", 400, 860, true},
		{"621", 621, 900, false}, {"961", 961, 900, false}, {"1361", 1361, 900, false}, {"1600", 1600, 900, false},
		{"4k", 3840, 2160, false}} {
		b := open(t, w.url("fleet"), look.width, look.height, look.dark)
		for _, v := range views {
			b.show(w, v.name)
			b.fits()
			b.even(v.name + " " + look.name)
			b.whole(v.name + " " + look.name)
			if v.name == "fleet" {
				b.await("document.querySelector('.row[data-kind=warn]')")
				b.do(chromedp.Click(".row[data-kind=warn]", chromedp.ByQuery))
				b.await("document.querySelector('dialog[open]')")
				b.whole("a worker " + look.name)
				b.press(kb.Escape)
				b.await("!document.querySelector('dialog[open]')")
			}
			if look.height == 900 && look.width != 1400 {
				continue
			}
			b.faults(v.name + " " + look.name)
			if !*pictures || look.name == "4k" || look.name == "400-dark" {
				continue
			}
			b.do(chromedp.Evaluate("document.activeElement.blur(), scrollTo(0, 0)", nil))
			var png []byte
			b.do(chromedp.CaptureScreenshot(&png))
			path := filepath.Join("..", "..", "..", "docs", "pictures", v.name+"-"+look.name+".png")
			if err := os.WriteFile(path, png, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
}

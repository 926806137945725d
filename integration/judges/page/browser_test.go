//go:build judges

package page

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// late finds answers after a pause of a process. The page repeats the request.
var late = regexp.MustCompile("status of 50[34]")

// browser is a tab in a separate Chromium.
type browser struct {
	*testing.T
	ctx  context.Context
	away atomic.Bool // requests may fail: the node is restarted
}

// open starts a Chromium, and shows an address in a window of a size.
func open(t *testing.T, url string, width, height int64, dark bool) *browser {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatalf("%v; run: go run ./integration/judges/fetch", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 4*harness.Patience)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewExecAllocator(ctx, chromedp.ExecPath(path), chromedp.UserDataDir(profile(t)),
		chromedp.Headless, chromedp.NoSandbox, chromedp.DisableGPU, chromedp.NoFirstRun, chromedp.Flag("disable-quic", true),
		chromedp.Flag("disable-background-networking", true), chromedp.Flag("disable-component-update", true),
		chromedp.Flag("disable-sync", true), chromedp.Flag("disable-dev-shm-usage", true),
		chromedp.WSURLReadTimeout(harness.Patience))
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	b := &browser{T: t, ctx: ctx}
	chromedp.ListenTarget(ctx, func(event any) {
		switch e := event.(type) {
		case *runtime.EventExceptionThrown:
			t.Errorf("the page fails: %v", e.ExceptionDetails)
		case *log.EventEntryAdded:
			failed := e.Entry.Source == log.SourceNetwork && (b.away.Load() || late.MatchString(e.Entry.Text))
			if e.Entry.Level == log.LevelError && !strings.Contains(e.Entry.Text, "401") && !failed {
				t.Errorf("message of Chromium: %s %s", e.Entry.Text, e.Entry.URL)
			}
		}
	})
	scheme := "light"
	if dark {
		scheme = "dark"
	}
	b.do(log.Enable(), emulation.SetDeviceMetricsOverride(width, height, 1, width < 600),
		emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}),
		chromedp.Navigate(url))
	return b
}

// profile is a directory that is removed at the end of the test. Chromium's helper processes outlive the main process
// and write files for a moment, which would fail t.TempDir.
func profile(t *testing.T) string {
	dir, err := os.MkdirTemp("", "kvatlas-page-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		harness.Eventually(t, "Chromium's profile is removed", func() (bool, string) {
			err := os.RemoveAll(dir)
			return err == nil, fmt.Sprint(err)
		})
	})
	return dir
}

func (b *browser) do(actions ...chromedp.Action) {
	b.Helper()
	if err := chromedp.Run(b.ctx, actions...); err != nil {
		b.Fatal(err)
	}
}

// get is the value of an expression in the page.
func get[T any](b *browser, expression string) (v T) {
	b.Helper()
	var text string
	b.do(chromedp.Evaluate("JSON.stringify("+expression+")", &text))
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		b.Fatalf("%s is %q: %v", expression, text, err)
	}
	return v
}

// await waits until an expression is true in the page.
func (b *browser) await(expression string) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, harness.Patience)
	defer cancel()
	poll := chromedp.Poll("Boolean("+expression+")", nil, chromedp.WithPollingTimeout(0))
	err := chromedp.Run(ctx, poll)
	for navigated(err) {
		err = chromedp.Run(ctx, poll)
	}
	if err != nil {
		var shown string
		_ = chromedp.Run(b.ctx, chromedp.Evaluate("document.body.innerText", &shown))
		b.Fatalf("waited for %s: %v; the page shows\n%s", expression, err, shown)
	}
}

// navigated reports whether an evaluation failed because the browser went to another page meanwhile.
func navigated(err error) bool {
	return err != nil && (strings.Contains(err.Error(), "Cannot find context") ||
		strings.Contains(err.Error(), "context was destroyed") || strings.Contains(err.Error(), "navigated or closed"))
}

// view goes to a view.
func (b *browser) view(name string) {
	b.Helper()
	b.do(chromedp.Evaluate(fmt.Sprintf("location.hash = '#/%s'", name), nil))
	b.await(fmt.Sprintf("document.querySelector('.bar a[aria-current]')?.getAttribute('href') === '#/%s'", name))
}

// press types keys.
func (b *browser) press(keys ...string) {
	b.Helper()
	for _, k := range keys {
		b.do(chromedp.KeyEvent(k))
	}
}

// tabTo presses the tabulator until the element of a selector has the focus.
func (b *browser) tabTo(selector string) {
	b.Helper()
	for range 100 {
		if get[bool](b, fmt.Sprintf("!!document.activeElement?.matches(%q)", selector)) {
			return
		}
		b.press(kb.Tab)
	}
	b.Fatalf("the keyboard does not come to %s", selector)
}

// focused fails unless the element of a selector gets the focus.
func (b *browser) focused(selector string) {
	b.Helper()
	b.await(fmt.Sprintf("document.activeElement.matches(%q)", selector))
}

// even fails if rows of tiles are uneven or do not fill the width.
func (b *browser) even(what string) {
	b.Helper()
	for _, fault := range get[[]string](b, `[...document.querySelectorAll(".tiles")].filter((e) => e.checkVisibility()).map((box) => {
		const rows = Object.values(Object.groupBy([...box.children], (e) => e.offsetTop)), most = rows[0].length;
		const right = box.getBoundingClientRect().right;
		return rows.every((r) => r.length > most - rows.length && r.length <= most &&
			Math.abs(r.at(-1).getBoundingClientRect().right - right) < 3) ? "" : rows.map((r) => r.length).join(" + ");
	}).filter(Boolean)`) {
		b.Errorf("%s: the layout of the tiles is %s", what, fault)
	}
}

// fits fails if the page is wider than the window.
func (b *browser) fits() {
	b.Helper()
	wide := get[[]int](b, "[document.documentElement.scrollWidth, innerWidth]")
	if wide[0] > wide[1] {
		b.Errorf("the page is %d pixels wide in a window of %d: %v", wide[0], wide[1], get[[]string](b,
			"[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"+
				".slice(0, 10).map(e => e.tagName + '.' + e.className)"))
	}
}

// whole fails if a text is cut unintentionally or overlaps another text. Ellipses and scrolling elements are intended.
func (b *browser) whole(what string) {
	b.Helper()
	for _, fault := range get[[]string](b, `(() => {
		const found = [], texts = [];
		const called = (e) => e.tagName + "." + e.className + " " + JSON.stringify(e.textContent.slice(0, 60));
		for (const e of (document.querySelector("dialog[open]") || document).querySelectorAll("*")) {
			if (!e.checkVisibility() || e.closest(".sr, .skip, textarea, option")) continue;
			if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
			const range = document.createRange();
			range.selectNodeContents(e);
			const r = range.getBoundingClientRect();
			const seen = { left: r.left, right: r.right, top: r.top, bottom: r.bottom };
			for (let p = e; p && p !== document.body; p = p.parentElement) {
				const style = getComputedStyle(p), box = p.getBoundingClientRect();
				if (style.overflowX === "visible") continue;
				const meant = style.textOverflow === "ellipsis" || style.overflowX === "auto";
				const list = p.querySelector(".body"); // scrolls vertically
				if (!meant && (r.left < box.left - 1 || r.right > box.right + 1) ||
					!list && style.overflowY === "hidden" && (r.top < box.top - 1 || r.bottom > box.bottom + 1)) {
					found.push("cut: " + called(e));
				}
				seen.left = Math.max(seen.left, box.left);
				seen.right = Math.min(seen.right, box.right);
				seen.top = Math.max(seen.top, box.top);
				seen.bottom = Math.min(seen.bottom, box.bottom);
				if (meant) break;
			}
			texts.push([e, seen]);
		}
		for (const [i, [a, r]] of texts.entries()) {
			for (const [b, s] of texts.slice(0, i)) {
				if (a.closest(".bar") !== b.closest(".bar") || a.contains(b) || b.contains(a)) continue;
				const wide = Math.min(r.right, s.right) - Math.max(r.left, s.left);
				const high = Math.min(r.bottom, s.bottom) - Math.max(r.top, s.top);
				if (wide >= 2 && high >= 4) found.push(called(a) + " lies upon " + called(b));
			}
		}
		return found;
	})()`) {
		b.Errorf("%s: %s", what, fault)
	}
}

// faults runs axe-core on the page. Serious and critical findings are failures.
func (b *browser) faults(what string) {
	b.Helper()
	source, err := os.ReadFile(pyenv.Vocabulary(b.T, "axe-core"))
	if err != nil {
		b.Fatal(err)
	}
	type violation struct {
		ID, Impact, Help string
		Nodes            []struct{ HTML, FailureSummary string }
	}
	var text string
	b.do(chromedp.Evaluate(string(source)+";0", nil), chromedp.Evaluate(
		"axe.run(document, {resultTypes: ['violations']}).then(r => JSON.stringify(r.violations))", &text,
		func(p *runtime.EvaluateParams) *runtime.EvaluateParams { return p.WithAwaitPromise(true) }))
	var found []violation
	if err := json.Unmarshal([]byte(text), &found); err != nil {
		b.Fatal(err)
	}
	for _, v := range found {
		said := b.Logf
		if v.Impact == "serious" || v.Impact == "critical" {
			said = b.Errorf
		}
		said("%s: %s, %s: %s", what, v.Impact, v.ID, v.Help)
		for i, n := range v.Nodes {
			if i < 5 {
				said("    %s\n        %s", n.HTML, n.FailureSummary)
			}
		}
	}
}

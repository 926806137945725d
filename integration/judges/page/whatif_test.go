//go:build judges

package page

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/operate/recording"
	"github.com/kvatlas/kvatlas/pkg/routing"
	"github.com/kvatlas/kvatlas/tools/whatif"
)

// predicted returns the report of a replay of generated conversations on three workers, with changes, and a file with
// the report in the form of indexer what-if --json.
func predicted(t *testing.T, changes whatif.Changes) (rep *whatif.Report, file string) {
	t.Helper()
	const requests, workers, size = 400, 3, harness.BlockSize
	in := whatif.NewInput(whatif.DefaultLimits(), "")
	r := rand.New(rand.NewPCG(7, 8))
	var open [40][]recording.Name
	at, next := time.Date(2026, 11, 1, 8, 0, 0, 0, time.UTC).UnixMilli(), recording.Name(0)
	for range requests {
		c := r.IntN(len(open))
		if len(open[c]) > 200 {
			open[c] = nil
		}
		before := len(open[c])
		for range 8 + r.IntN(24) {
			next++
			open[c] = append(open[c], next)
		}
		tokens := uint64(len(open[c]) * size)
		first := uint64(15 + len(open[c]) - before + r.IntN(10))
		q := &recording.Joined{Flags: recording.Ended | recording.Reported}
		q.Request = recording.Request{Time: at, Model: "m", BlockSize: size, Span: size, Tokens: tokens, Output: 64,
			Names: slices.Clone(open[c]), Session: recording.Name(c + 1), Policy: "kvatlas",
			Place: recording.Place{Worker: fmt.Sprint("w", c%workers)}}
		q.End = recording.End{Freed: true, Life: first + 300, FirstToken: first, Blocks: 4}
		q.Report = recording.Report{Cached: uint64(before * size)}
		if err := in.Add(q); err != nil {
			t.Fatal(err)
		}
		at += int64(20 + r.IntN(80))
	}
	fleet := &whatif.Fleet{}
	for w := range workers {
		fleet.Workers = append(fleet.Workers, whatif.Worker{Name: fmt.Sprint("w", w), DeviceBlocks: 2000})
	}
	rep, err := whatif.Run(t.Context(), whatif.Options{Input: in, Fleet: fleet, Changes: changes,
		Routing: routing.DefaultConfig(), Seeds: 1})
	if err != nil {
		t.Fatal(err)
	}
	return rep, saved(t, rep)
}

// saved writes a value to a file in JSON.
func saved(t *testing.T, v any) (file string) {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(t.TempDir(), "report.json")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// open opens a report on the page.
func (b *browser) open(file string) {
	b.Helper()
	b.do(chromedp.SetUploadFiles("#whatif-file", []string{file}, chromedp.ByID))
}

// drop drops a file with the value of an expression on the page.
func (b *browser) drop(text string) {
	b.Helper()
	b.do(chromedp.Evaluate(fmt.Sprintf(`(() => {
		const carried = new DataTransfer();
		carried.items.add(new File([%s], "dropped.json"));
		for (const type of ["dragover", "drop"]) {
			const e = new DragEvent(type, { bubbles: true, cancelable: true, dataTransfer: carried });
			document.querySelector("main").dispatchEvent(e);
			if (!e.defaultPrevented) throw new Error("the browser would leave the page");
		}
	})()`, text), nil))
}

// figure returns the cells of a row of the table.
func (b *browser) figure(name string) []string {
	b.Helper()
	return get[[]string](b, fmt.Sprintf("[...document.querySelectorAll('[data-figure=%s] td')].map(e => e.textContent)", name))
}

// TestWhatIf opens reports of real replays: the page has their figures, first the error of the replay, and plots the
// effect. Broken and hostile files change nothing.
func TestWhatIf(t *testing.T) {
	t.Parallel()
	rep, file := predicted(t, whatif.Changes{Workers: 2, Capacity: &whatif.Amount{Factor: 2}})
	same, sameFile := predicted(t, whatif.Changes{})
	x := harness.StartIndexer(t, t.TempDir(), "")
	b := open(t, "http://"+x.HTTP+"/#/whatif", 1200, 900, false)
	b.await("document.querySelector('main').innerText.includes('No report yet')")
	b.fits()
	b.faults("no report")

	b.open(file)
	b.await("document.getElementById('whatif-plot').dataset.bars == 8")
	rate := func(share float64) string { return fmt.Sprintf("%.1f%%", 100*share) }
	sign := func(text string) string { return strings.Replace(text, "-", "−", 1) }
	points := sign(fmt.Sprintf("%+.1f points", 100*(rep.Expected.HitRate-rep.Measured.HitRate)))
	if math.Abs(rep.Expected.HitRate-rep.Measured.HitRate) <= math.Abs(rep.HistoryError.HitRate) {
		points += ", noise"
	}
	want := []string{rate(rep.Measured.HitRate), rate(rep.History.HitRate), rate(rep.Baseline.HitRate),
		rate(rep.Changed.HitRate), rate(rep.Expected.HitRate) + " " + points}
	if got := b.figure("hitRate"); !slices.Equal(got, want) {
		t.Errorf("the hit rates are %q, want %q", got, want)
	}
	if got := b.figure("workers"); !slices.Equal(got, []string{"3", "3", "3", "5", "5"}) {
		t.Errorf("the numbers of workers are %q", got)
	}
	tiles := get[[]string](b, "[...document.querySelectorAll('.tile dd')].map(e => e.textContent)")
	e := rep.HistoryError
	wantTiles := []string{sign(fmt.Sprintf("%+.1f points", 100*e.HitRate))}
	for _, relative := range []*float64{e.TTFTMean, e.TTFTP50, e.TTFTP99} {
		wantTiles = append(wantTiles, sign(fmt.Sprintf("%+.0f%%", 100**relative)))
	}
	if !slices.Equal(tiles, wantTiles) {
		t.Errorf("the errors of the replay are %q, want %q", tiles, wantTiles)
	}
	shown := get[string](b, "document.querySelector('main').innerText")
	about := []string{"400 requests of m", "workers: +2; device memory: 2 times as much"}
	for _, want := range append(about, rep.Notes...) {
		if !strings.Contains(shown, want) {
			t.Errorf("the page does not show %q:\n%s", want, shown)
		}
	}
	b.tabTo("#whatif-plot")
	b.press(kb.Home)
	b.await(fmt.Sprintf("document.getElementById('whatif-now').textContent === 'Hit rate, measured: %s'",
		rate(rep.Measured.HitRate)))
	b.press(kb.End)
	b.await("document.getElementById('whatif-now').textContent.startsWith('TTFT p99, expected: ')")
	b.fits()
	b.whole("a report")
	b.faults("a report")
	b.view("cluster")
	b.view("whatif")
	if got := b.figure("hitRate"); !slices.Equal(got, want) {
		t.Errorf("after another view the hit rates are %q", got)
	}

	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	literal := func(text string) string {
		quoted, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		return string(quoted)
	}
	for broken, why := range map[string]string{
		literal(""): "no JSON", literal("[]"): "no object", literal("{}"): "model", "' '.repeat(16 << 20) + '{}'": "16 MiB",
		literal(strings.Replace(string(text), `"hit_rate":`, `"hit_rate":1e999,"x":`, 1)): "hit_rate",
		literal(strings.Replace(string(text), `"hit_rate":`, `"hit_rate":"0.5","x":`, 1)): "hit_rate",
		literal(strings.Replace(string(text), `"expected":`, `"x":`, 1)):                  "expected is missing",
	} {
		b.drop(broken)
		b.await("document.querySelector('.error').textContent.startsWith('dropped.json: ')")
		b.await(fmt.Sprintf("document.querySelector('.error').textContent.includes(%q)", why))
		if got := b.figure("hitRate"); !slices.Equal(got, want) {
			t.Errorf("after a broken file the hit rates are %q", got)
		}
	}
	rep.Model = `<img src=x onerror="document.title='run'">`
	rep.Notes = []string{rep.Model, "</ul><script>document.title='run'</script>"}
	hostile, err := json.Marshal(rep)
	if err != nil {
		t.Fatal(err)
	}
	b.drop(literal(string(hostile)))
	b.await("document.querySelector('main').innerText.includes('<img src=x')")
	b.await("document.querySelector('.error').textContent === ''")
	if get[bool](b, "document.title === 'run' || !!document.querySelector('main img, main script')") {
		t.Error("the page runs a text of the report")
	}

	b.open(sameFile)
	b.await("document.querySelector('main').innerText.includes('No changes.')")
	want = []string{rate(same.Measured.HitRate), rate(same.History.HitRate), rate(same.Baseline.HitRate)}
	if got := b.figure("hitRate"); !slices.Equal(got, want) {
		t.Errorf("without changes the hit rates are %q, want %q", got, want)
	}
}

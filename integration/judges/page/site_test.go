//go:build judges

package page

import (
	"os/exec"
	"path/filepath"
	"testing"
)

// TestSite opens the static site of the documentation from a disk. The search, with only the keyboard, finds the right
// page for some words, and its first result opens. The site is dark on request, and fits into a narrow window.
func TestSite(t *testing.T) {
	out := filepath.Join(t.TempDir(), "site")
	cmd := exec.Command("go", "run", "./tools/site", "--out", out)
	cmd.Dir = "../../.."
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, text)
	}
	b := open(t, "file://"+filepath.Join(out, "docs", "try.html"), 1280, 900, true)
	if colour := get[string](b, "getComputedStyle(document.body).backgroundColor"); colour != "rgb(20, 23, 26)" {
		t.Errorf("the background of the dark page is %s", colour)
	}
	const first, at = "document.querySelector('#found a')", "location.pathname + location.hash"
	for _, c := range []struct{ words, heading, end string }{
		{"from an archive", "Installing: From an archive", "/docs/install.html#from-an-archive"},
		{"rights of a key", "Security: Rights of a key", "/docs/security.html#rights-of-a-key"},
		{"ray serve replica_metadata", "Routers written in Python: Ray Serve LLM", "/docs/python-routers.html#ray-serve-llm"},
	} {
		b.press("/")
		b.focused("#search input")
		if typed := get[string](b, "document.querySelector('#search input').value"); typed != "" {
			t.Errorf("the key of the search typed %q", typed)
		}
		b.press(c.words)
		b.await(first + "?.querySelector('b').textContent === '" + c.heading + "'")
		b.press("\r")
		b.await("(" + at + ").endsWith('" + c.end + "')")
		b.await("document.readyState === 'complete'")
	}
	b.press("/", "no such word anywhere qqq")
	b.await("document.querySelector('#found li')?.textContent.startsWith('No section')")
	narrow := open(t, "file://"+filepath.Join(out, "index.html"), 400, 800, false)
	narrow.fits()
}

package tables

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestRegionsTable compares the table of regions with the example of docs/regions.md.
func TestRegionsTable(t *testing.T) {
	t.Parallel()
	us, ap := 80.0, 210.0
	var b strings.Builder
	regionPrefixes(&b, []api.RegionPrefix{
		{Region: "eu", Local: true, Blocks: 12, Tokens: 192, State: api.RegionComplete},
		{Region: "ap", Blocks: 7, PriceMS: &ap, AgeMS: 74_000, State: api.RegionUnknown,
			Reason: "the last digest is older than 1m0s"},
		{Region: "us", Blocks: 290, Tokens: 4640, PriceMS: &us, AgeMS: 6_120, State: api.RegionComplete},
	})
	page, err := os.ReadFile("../../../docs/regions.md")
	if err != nil {
		t.Fatal(err)
	}
	example := regexp.MustCompile(`(?m)^    REGION .*\n(?:    .*\n)+`).FindString(string(page))
	if got, want := trimmed(b.String()), trimmed(example); got != want || want == "" {
		t.Errorf("the table is\n%s\nand the example\n%s", got, want)
	}
	b.Reset()
	if regionPrefixes(&b, nil); b.Len() > 0 {
		t.Errorf("without regions: %q", b.String())
	}
}

// trimmed returns the lines without spaces around them.
func trimmed(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "\n")
}

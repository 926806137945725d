package metrics

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
)

var update = flag.Bool("update", false, "write the tables in docs/metrics.md")

const page = "../../../docs/metrics.md"

// table describes the metrics of a scrape in Markdown.
func table(t *testing.T, scrape string) string {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(scrape))
	if err != nil {
		t.Fatal(err)
	}
	var rows []string
	for name, f := range families {
		if !strings.HasPrefix(name, "kvatlas_") {
			continue
		}
		var labels []string
		for _, l := range f.Metric[0].Label {
			labels = append(labels, "`"+l.GetName()+"`")
		}
		kind := strings.ToLower(dto.MetricType_name[int32(f.GetType())])
		help := strings.ReplaceAll(f.GetHelp(), "|", "\\|")
		rows = append(rows, fmt.Sprintf("| `%s` | %s | %s | %s |\n", name, kind, strings.Join(labels, " "), help))
	}
	slices.Sort(rows)
	return "| metric | type | labels | meaning |\n|---|---|---|---|\n" + strings.Join(rows, "")
}

// holdPage compares a table with a part of the page, which ends at the next blank line. With -update it writes the
// table.
func holdPage(t *testing.T, heading, want string) {
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, after, found := strings.Cut(string(text), "\n"+heading+"\n\n")
	is, rest, _ := strings.Cut(after, "\n\n")
	switch {
	case !found:
		t.Fatalf("%s has no heading %q", page, heading)
	case *update:
		if rest != "" {
			rest = "\n" + rest
		}
		err := os.WriteFile(page, []byte(before+"\n"+heading+"\n\n"+want+rest), 0o644)
		if err != nil {
			t.Fatal(err)
		}
	case strings.TrimSpace(is) != strings.TrimSpace(want):
		t.Errorf("%s differs from the code under %q: run go generate ./internal/operate/metrics", page, heading)
	}
}

// TestPage compares docs/metrics.md with the metrics of a node, and these with every name in the code.
func TestPage(t *testing.T) {
	scrape := everything(t)
	var source []byte
	for _, file := range []string{"metrics.go", "queries.go", "curves.go"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		source = append(source, text...)
	}
	for _, m := range regexp.MustCompile(`"(kvatlas_\w+[a-z])"`).FindAllStringSubmatch(string(source), -1) {
		if !strings.Contains(scrape, "# TYPE "+m[1]+" ") {
			t.Errorf("the function everything has no %s: extend it for the page and the linter", m[1])
		}
	}
	holdPage(t, "## Of an indexer", table(t, scrape))
	holdPage(t, "## Of a shim", table(t, get(t, NewShim(shimFigures))))
}

func shimFigures() *host.Sum {
	one := map[string]uint64{"x": 1}
	return &host.Sum{Ranks: one, Incidents: one, Skipped: one, Spans: one}
}

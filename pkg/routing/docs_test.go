package routing

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// table returns the cells of the rows below the first table header of text that begins with these columns.
func table(text string, columns ...string) (rows [][]string) {
	_, after, _ := strings.Cut(text, "| "+strings.Join(columns, " | "))
	for i, line := range strings.Split(after, "\n") {
		switch {
		case i < 2: // the rest of the header, and the rule
		case !strings.HasPrefix(line, "|"):
			return rows
		default:
			cells := strings.Split(strings.Trim(line, "|"), "|")
			for i := range cells {
				cells[i] = strings.Trim(cells[i], " `")
			}
			rows = append(rows, cells)
		}
	}
	return rows
}

// TestOutputInDocs compares the printed explanation in docs/routing.md with the terms of the policy kvatlas: their
// names and order, their sums, the chosen worker, and a row for each of them in the table that explains them.
func TestOutputInDocs(t *testing.T) {
	page, err := os.ReadFile("../../docs/routing.md")
	if err != nil {
		t.Fatal(err)
	}
	var columns, terms []string
	for _, e := range expectedTerms {
		terms = append(terms, strings.ToUpper(e))
	}
	costs := map[string]float64{}
	chosen := ""
	for _, line := range strings.Split(string(page), "\n") {
		fields := strings.Fields(strings.TrimPrefix(strings.Trim(line, " "), "*"))
		switch {
		case strings.HasPrefix(line, "   WORKER "):
			columns = fields[len(fields)-len(terms):]
		case len(columns) > 0 && len(fields) == len(terms)+5 && strings.HasPrefix(fields[0], "worker-"):
			numbers := make([]float64, len(fields))
			for i, f := range fields[1:] {
				if numbers[i+1], err = strconv.ParseFloat(f, 64); err != nil {
					t.Fatal(err)
				}
			}
			sum := 0.0
			for _, x := range numbers[len(fields)-len(terms):] {
				sum += x
			}
			if math.Abs(sum-numbers[2]) > 0.0005*float64(len(terms)+1) {
				t.Errorf("the terms of %s sum up to %v, not to its cost %v", fields[0], sum, numbers[2])
			}
			if costs[fields[0]] = numbers[2]; strings.HasPrefix(line, "*") {
				chosen = fields[0]
			}
		}
	}
	if !slices.Equal(columns, terms) || len(costs) != 3 || chosen == "" {
		t.Fatalf("%d candidates with the columns %v, not %v; the chosen candidate is %q", len(costs), columns, terms, chosen)
	}
	for worker, cost := range costs {
		if cost < costs[chosen] {
			t.Errorf("%s is chosen, but %s costs %v", chosen, worker, cost)
		}
	}
	var explained []string
	for _, row := range table(string(page), "term", "the time", "in the example") {
		explained = append(explained, strings.ToUpper(row[0]))
	}
	if !slices.Equal(explained, terms) {
		t.Errorf("the page explains the terms %v, not %v", explained, terms)
	}
}

// TestExampleInDesign computes the example of DESIGN.md from its first table and compares the rest with it.
func TestExampleInDesign(t *testing.T) {
	page, err := os.ReadFile("DESIGN.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(page), "\n## An example of the policy dynamo\n")
	text, _, _ = strings.Cut(text, "\n## ")
	workers := map[string]*Worker{}
	var candidates []Candidate
	for _, row := range table(text, "candidate", "device", "host", "disk", "would load") {
		number := func(i int) uint64 {
			n, err := strconv.ParseUint(row[i], 10, 32)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		id, rank, _ := strings.Cut(row[0], "/")
		if workers[id] == nil {
			workers[id] = &Worker{ID: events.WorkerID(id)}
		}
		switch row[8] {
		case "draining":
			workers[id].State = Draining
		case "fast":
			workers[id].Taints = []string{"fast"}
		}
		candidates = append(candidates, Candidate{Worker: workers[id], Rank: events.Rank(rank[0] - '0'),
			Device: uint32(number(1)), Host: uint32(number(2)), Disk: uint32(number(3)), WouldLoad: uint32(number(4)),
			HasLoad: true, ActivePrefillTokens: number(5), ActiveBlocks: number(6), NewBlocks: number(7)})
	}
	if len(candidates) != 5 {
		t.Fatalf("the table has %d candidates", len(candidates))
	}
	r := &Request{ISL: 1000, BlockSize: 16, Blocks: 62, PreferredTaints: []TaintWeight{{"fast", 0.5}}, Explain: true}
	rng, scratch := rand.New(rand.NewPCG(1, 2)), new(Scratch)
	s := newSelector(t, "dynamo", nil)
	choice, err := s.Choose(r, candidates, rng, scratch)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(text, fmt.Sprintf("%d blocks, %d of them whole", r.RequestBlocks(), r.Blocks)) ||
		choice.Worker != "c" || choice.Rank != 0 {
		t.Errorf("%d blocks, %d whole; the choice is %+v", r.RequestBlocks(), r.Blocks, choice)
	}
	for _, d := range choice.Explanation.Dropped {
		if says := fmt.Sprintf("%s/%d is dropped", d.Worker, d.Rank); !strings.Contains(text, says) ||
			!strings.Contains(text, fmt.Sprintf("`%s`, %q", d.Filter, d.Reason)) {
			t.Errorf("the page lacks %s: %s, %s", says, d.Filter, d.Reason)
		}
	}
	temperature := 0.5
	r.Overrides.RouterTemperature = &temperature
	warm, err := s.Choose(r, candidates, rng, scratch)
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for i, c := range choice.Explanation.Candidates {
		x := c.Terms
		want = append(want, fmt.Sprintf("| %s/%d | %.5g | %.5g | %.5g | %.5g | %.5g | %.5g | %.5g | %.3f | %.5g | %.3f |",
			c.Worker, c.Rank, x.RawPrefill, x.DeviceCredit, x.HostCredit, x.DiskCredit, x.SharedCredit, x.Prefill, x.Decode,
			x.TaintFactor, c.Cost, warm.Explanation.Candidates[i].Probability))
	}
	if !strings.Contains(text, strings.Join(want, "\n")) {
		t.Errorf("the page lacks the rows\n%s", strings.Join(want, "\n"))
	}
	e := choice.Explanation.Candidates[0].Estimate
	says := fmt.Sprintf("count %v blocks as cached, which are %d tokens, and %d tokens of prefill; and the rank's requests "+
		"would have %d blocks", e.EffectiveOverlap, e.CachedTokens, e.EffectivePrefillTokens, e.PotentialDecodeBlocks)
	if !strings.Contains(strings.ReplaceAll(text, "\n", " "), says) {
		t.Errorf("the page lacks %q", says)
	}
}

// TestSettingsInDocs checks that the table of docs/routing-settings.md has all settings with their defaults.
func TestSettingsInDocs(t *testing.T) {
	page, err := os.ReadFile("../../docs/routing-settings.md")
	if err != nil {
		t.Fatal(err)
	}
	defaults := map[string]string{}
	for _, row := range table(string(page), "name", "default", "range") {
		names, values := strings.Split(row[0], "`, `"), strings.Split(row[1], ", ")
		for i, name := range names {
			value, _, _ := strings.Cut(values[i], ";")
			defaults[name] = value
		}
	}
	config := reflect.ValueOf(DefaultConfig())
	for i := range config.NumField() {
		name, _, _ := strings.Cut(config.Type().Field(i).Tag.Get("json"), ",")
		value := fmt.Sprint(config.Field(i))
		if value == "<nil>" {
			value = "never"
		}
		if defaults[name] != value {
			t.Errorf("%s: %q on the page, %q in the code", name, defaults[name], value)
		}
		delete(defaults, name)
	}
	if len(defaults) > 0 {
		t.Errorf("unknown settings on the page: %v", defaults)
	}
}

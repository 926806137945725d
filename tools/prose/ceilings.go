package main

import (
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
)

// Ceilings are the greatest permitted rates of places above the limits, in the order of kinds.
type Ceilings map[string][len(kinds)]float64

const ceilingsHead = `# The greatest permitted figures of places above the limits of tools/prose, per 1,000 words.
# "go generate ./tools/prose" lowers the figures. Never raise a figure or add a row by hand.
# place	what	who	nobody	pronoun	person
`

// ReadCeilings reads a file that Lower has written. A missing file is an error.
func ReadCeilings(file string) (Ceilings, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	ceilings := Ceilings{}
	for i, line := range strings.Split(string(text), "\n") {
		if line == "" || line[0] == '#' {
			continue
		}
		fields := strings.Split(line, "\t")
		if len(fields) != 1+len(kinds) {
			return nil, fmt.Errorf("%s:%d: %d fields, want %d", file, i+1, len(fields), 1+len(kinds))
		}
		var row [len(kinds)]float64
		for j, field := range fields[1:] {
			if row[j], err = strconv.ParseFloat(field, 64); err != nil {
				return nil, fmt.Errorf("%s:%d: %w", file, i+1, err)
			}
		}
		ceilings[fields[0]] = row
	}
	return ceilings, nil
}

// Check returns a message for every figure above the ceiling and for every ceiling without a use.
func Check(ceilings Ceilings, report *Report) (faults []string) {
	judged := report.judged()
	for _, name := range judged {
		f := report.Places[name]
		row, listed := ceilings[name]
		if listed && f.excess() <= 1 {
			faults = append(faults, name+" meets the limits: remove the ceiling with go generate ./tools/prose")
		}
		for i, k := range kinds {
			if ceiling := max(k.limit, row[i]); f.Rate(i) > ceiling {
				faults = append(faults, fmt.Sprintf("%s has %.1f of %q in 1,000 words, above %.1f: "+
					"go run ./tools/prose -lines 20 %s prints the sentences to rewrite",
					name, f.Rate(i), k.name, ceiling, strings.TrimSuffix(name, " (tests)")))
			}
		}
	}
	for name := range ceilings {
		if !slices.Contains(judged, name) {
			faults = append(faults, name+" is missing or too short: remove the ceiling with go generate ./tools/prose")
		}
	}
	slices.Sort(faults)
	return faults
}

// Lower returns the file with the ceilings lowered to the present figures, rounded up. Lower removes the rows of places
// within the limits and of missing places.
func Lower(ceilings Ceilings, report *Report) []byte {
	text := []byte(ceilingsHead)
	for _, name := range report.judged() {
		row, listed := ceilings[name]
		if f := report.Places[name]; listed && f.excess() > 1 {
			text = append(text, name...)
			for i := range kinds {
				text = fmt.Appendf(text, "\t%g", min(row[i], math.Ceil(f.Rate(i))))
			}
			text = append(text, '\n')
		}
	}
	return text
}

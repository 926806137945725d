package main

import (
	"fmt"
	"strings"
)

// Check returns a message for every figure above the limit, in the order of the places' names.
func Check(report *Report) (faults []string) {
	for _, name := range report.judged() {
		f, path := report.Places[name], name
		if at := strings.LastIndex(name, " ("); at > 0 {
			path = name[:at]
		}
		for i, k := range kinds {
			if f.Rate(i) > k.limit {
				faults = append(faults, fmt.Sprintf("%s has %.1f of %q in 1,000 words, above %.1f: "+
					"go run ./tools/prose -lines 20 %s prints the sentences to rewrite",
					name, f.Rate(i), k.name, k.limit, path))
			}
		}
	}
	return faults
}

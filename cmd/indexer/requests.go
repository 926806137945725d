package main

import (
	"fmt"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// requestsLine describes the outcomes of requests to a node; empty without requests.
func requestsLine(counts []api.RequestCount) string {
	var parts []string
	last := ""
	for _, c := range counts {
		if by := fmt.Sprintf("%s over %s", c.Operation, c.Transport); by != last {
			parts, last = append(parts, by), by
		}
		parts[len(parts)-1] += fmt.Sprintf(" %s %d", c.Outcome, c.Count)
	}
	return strings.Join(parts, ", ")
}

// Package observe runs Prometheus with the files in deploy. promtool checks the rules and runs their tests. A server
// scrapes a cluster of three nodes under load, evaluates the rules, and answers every query of the dashboard. Build tag
// judges; see `make judges`.
package observe

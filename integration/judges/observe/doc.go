// Package observe has Prometheus itself read what deploy has for it: promtool checks the rules and runs their tests,
// and a server scrapes a cluster of three nodes under load, evaluates the rules, and answers every query of the
// dashboard. Build tag judges; see `make judges`.
package observe

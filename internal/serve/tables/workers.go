package tables

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// leaseAge and leaseLeft return the time since the renewal of a lease, and the time until the expiry.
func leaseAge(l *api.Lease, now time.Time) string {
	if l == nil {
		return "-"
	}
	return max(now.Sub(l.Renewed), 0).Round(time.Second).String()
}

func leaseLeft(l *api.Lease, now time.Time) string {
	switch {
	case l == nil:
		return "never"
	case l.State != string(registry.Held):
		return l.State
	}
	left := max(l.Expires.Sub(now), 0).Round(time.Second).String()
	if l.Stopped != nil {
		left += ", shim stopped"
	}
	return left
}

// engineState returns the state of a rank's engine and, unless it is connected, the time in the state.
func engineState(w *api.WorkerInfo, now time.Time) string {
	text := string(w.Engine)
	switch {
	case w.Engine == "":
		text = "-"
	case w.Engine != api.EngineConnected && w.EngineSince != nil:
		text += " " + max(now.Sub(*w.EngineSince), 0).Round(time.Second).String()
	}
	if w.CatchingUp {
		text += ", catching up"
	}
	return text
}

// Workers prints a line for each rank.
func Workers(w io.Writer, list *api.WorkerList) {
	if !list.Complete {
		cli.Fprintf(w, "INCOMPLETE: partitions %v are not available; see indexer status\n", list.Missing)
	}
	defer expired(w, list.Expired, time.Now())
	if len(list.Workers) == 0 {
		cli.Fprintln(w, "no worker has published events yet; start worker-shim run for an engine")
		return
	}
	rows := make([][]any, len(list.Workers))
	for i, k := range list.Workers {
		seen := "-"
		if !k.LastSeen.IsZero() {
			seen = k.LastSeen.UTC().Format(time.RFC3339)
		}
		rows[i] = []any{k.Instance, k.Rank, k.Model, k.BlockSize, k.Partition, k.Blocks.Device, k.Blocks.Host,
			k.Blocks.Disk, k.Blocks.External,
			max(k.Pending, k.Parked), k.LastEvent, seen, leaseAge(k.Lease, time.Now()), leaseLeft(k.Lease, time.Now()),
			engineState(&k, time.Now()), stateOf(k.Record)}
	}
	WorkersColumns.Table(w, rows)
	reported(w, list.Workers)
	reasons(w, list.Workers)
}

// reported prints the loads that engines report.
func reported(w io.Writer, list []api.WorkerInfo) {
	for i := range list {
		if r := list[i].Reported; r != nil {
			cli.Fprintf(w, "%s/%d reports %s\n", list[i].Instance, list[i].Rank, reportOf(r))
		}
	}
}

// reportOf describes a report: requests, used memory, sender and age.
func reportOf(r *routing.Reported) string {
	var parts []string
	if q := r.Requests; q != nil {
		parts = append(parts, fmt.Sprintf("%d running and %d waiting requests, %d of them of other routers", q.Running,
			q.Waiting, q.Others))
	}
	if r.Capacity > 0 {
		parts = append(parts, fmt.Sprintf("%d of %d blocks in use", r.UsedBlocks, r.Capacity))
	} else if r.UsedBlocks > 0 {
		parts = append(parts, cli.Count(r.UsedBlocks, "block")+" in use")
	}
	if r.PrefillTokens > 0 {
		parts = append(parts, cli.Count(r.PrefillTokens, "token")+" to compute")
	}
	from := ""
	if r.Source != "" {
		from = "from " + r.Source + ", "
	}
	return fmt.Sprintf("%s (%s%.1f s ago)", strings.Join(parts, ", "), from, r.AgeS)
}

// expired prints the leases that have expired within the last hour.
func expired(w io.Writer, list []api.ExpiredWorker, now time.Time) {
	for i := range list {
		k := &list[i]
		cli.Fprintf(w, "%s/%d is gone: the worker's shim, process %d on %s, renewed the lease last %s ago; the worker's "+
			"blocks are cleared\n", k.Instance, k.Rank, k.Lease.PID, k.Lease.Host, leaseAge(&k.Lease, now))
	}
}

// stateOf returns the state of a rank, and the role unless aggregated.
func stateOf(r *api.WorkerRecord) string {
	switch {
	case r == nil:
		return "-"
	case r.Role == api.RoleAggregated || r.Role == "":
		return string(r.State)
	}
	return fmt.Sprintf("%s, %s", r.State, r.Role)
}

// reasons prints the reasons why workers are not schedulable, once for all ranks of a worker with the same reason.
func reasons(w io.Writer, list []api.WorkerInfo) {
	said := map[string]bool{}
	for _, k := range list {
		if k.Record == nil || len(k.Record.Reasons) == 0 {
			continue
		}
		line := fmt.Sprintf("%s is %s: %s", k.Instance, k.Record.State, strings.Join(k.Record.Reasons, "; "))
		if !said[line] {
			said[line] = true
			cli.Fprintln(w, line)
		}
	}
}

// Worker prints the registration of a worker.
func Worker(w io.Writer, k *api.Worker) {
	if len(k.Ranks) == 0 {
		cli.Fprintf(w, "%s: not registered now\n", k.Instance)
		return
	}
	rows := make([][]any, len(k.Ranks))
	list := make([]api.WorkerInfo, len(k.Ranks))
	for i := range k.Ranks {
		r := &k.Ranks[i]
		rows[i] = []any{k.Instance, r.Rank, k.Model, r.Role, orDash(r.Endpoint), known(r.TotalKVBlocks),
			known(r.MaxBatchedTokens), orDash(strings.Join(r.Taints, ",")), orDash(domains(r.TopologyDomains)),
			orDash(strings.Join(r.LoRAAdapters, ",")), r.State}
		list[i] = api.WorkerInfo{Instance: k.Instance, Record: &r.WorkerRecord}
	}
	WorkerColumns.Table(w, rows)
	reasons(w, list)
}

// known formats a number; 0 is unknown.
func known[T uint32 | uint64](n T) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

// orDash replaces an empty text by "-".
func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}

// domains formats topology domains as "name=value,...".
func domains(m map[string]string) string {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(m)) {
		list = append(list, name+"="+m[name])
	}
	return strings.Join(list, ",")
}

// RemovalOrder prints the workers in the order of removal.
func RemovalOrder(w io.Writer, list *api.RemovalOrder) {
	if !list.Complete {
		cli.Fprintf(w, "INCOMPLETE: partitions %v and nodes %v are missing; blocks there do not count\n", list.Missing,
			list.Unheard)
	}
	rows := make([][]any, len(list.Workers))
	for i, k := range list.Workers {
		rows[i] = []any{k.Worker, k.Unique, fmt.Sprintf("%.1f", k.RequestsPerHour), fmt.Sprintf("%.1f", k.BlocksPerHour),
			fmt.Sprintf("%.1f", k.MSPerHour/1000)}
	}
	RemovalColumns.Table(w, rows)
	cli.Fprintf(w, "%s stand for %.0f requests an hour; a block costs %.2f ms\n",
		cli.Count(uint64(list.Sample), "recorded request"), list.RequestsPerHour, list.MSPerBlock)
	if list.BlockSample > 1 {
		cli.Fprintf(w, "UNIQUE is an estimate from one of %d blocks\n", list.BlockSample)
	}
}

package whatif

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/operate/recording"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/launch"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// flags are the flags of the command.
type flags struct {
	since, until, model, file, fleet          string
	workers, capacity, host, fleetSize        string
	policy, routingConfig                     string
	routers, tokenBytes, seeds, most, replays int
	quiet                                     bool
}

// Command returns indexer what-if.
func Command() *cobra.Command {
	var fl flags
	cmd := &cobra.Command{
		Use:   "what-if --since 24h --model M [--workers +2] [--capacity 2x] [--host-tier 200GiB] [--policy NAME]",
		Short: "Predict hit rate and latency of a changed fleet from the recorded traffic",
		Long: `Replay the recorded requests (indexer serve --record) through the real index and the real policies on simulated
engines, in virtual time, and print hit rate, times to the first token (TTFT), throughput and cost of the changed fleet
beside the measured values. The first lines are the error of the replay itself: the recorded history against the
measured values.

The first half of the requests fills the caches and fits the speed of the simulated engines to the recorded latencies.
All figures are of the second half. EXPECTED is the measured hit rate plus the difference between the replays of the
changed fleet and of today's fleet. Times and throughput are the measured ones, multiplied by CHANGED / TODAY'S FLEET.
docs/what-if.md explains the assumptions.

The requests come from JetStream, and the workers with their capacities from an indexer. --file and --fleet read both
from files. The NATS user needs the rights of a node, or of an analyst together with --fleet.

Exit status 1 if there is too little data or the change cannot be simulated, 2 for wrong flags.`,
		Example: `  indexer what-if --since 24h --model llama
  indexer what-if --since 24h --model llama --workers +2
  indexer what-if --model llama --capacity 2x --policy dynamo --json
  indexer record export --format json > requests.jsonl && indexer workers --json > workers.json
  indexer what-if --file requests.jsonl --fleet workers.json --workers -1`,
	}
	a := remote.Flags(cmd)
	cli.Flags{
		cli.Var(&fl.since, "since", "",
			"first arrival: a duration before now, such as 24h, or a time (RFC 3339); empty: all"),
		cli.Var(&fl.until, "until", "", "end of arrivals, in the same forms; empty: now"),
		cli.Var(&fl.model, "model", "", "the model; may be omitted if the recording has a single model"),
		cli.Var(&fl.file, "file", "", "file of indexer record export --format json, in place of JetStream"),
		cli.Var(&fl.fleet, "fleet", "", "file of indexer workers --json, in place of an indexer"),
		cli.Var(&fl.fleetSize, "fleet-capacity", "",
			"device memory of each of today's workers, in tokens or bytes, if it is not registered"),
		cli.Var(&fl.workers, "workers", "", "change: workers to add or remove, such as +2 or -1"),
		cli.Var(&fl.capacity, "capacity", "",
			"change: device memory for KV cache of each worker: a factor such as 2x, tokens, or bytes such as 80GiB"),
		cli.Var(&fl.host, "host-tier", "",
			"change: host memory for KV cache of each worker: a factor such as 2x, tokens, or bytes such as 200GiB; "+
				"0 removes the tier"),
		cli.Var(&fl.policy, "policy", "", "change: the policy, or a way of indexer simulate --arms"),
		cli.Var(&fl.routers, "routers", 0,
			"change: routers with an index and loads of their own; 0: shared by all nodes, as now"),
		cli.Var(&fl.tokenBytes, "token-bytes", 0, "bytes of the KV cache of a token on a worker, for sizes in bytes"),
		cli.Var(&fl.routingConfig, "routing-config", "",
			"file with the routing settings of indexer serve; empty: the defaults"),
		cli.Var(&fl.seeds, "seeds", 3, "replays of each fleet; the figures are medians"),
		cli.Var(&fl.most, "max-requests", DefaultLimits().Requests, "requests to replay: the latest; bounds the memory"),
		cli.Var(&fl.replays, "parallel", 0, "replays at a time; 0: one for each processor"),
		cli.Var(&fl.quiet, "quiet", false, "print no progress"),
	}.Add(cmd.Flags())
	cli.Output[*Report](cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		o, filter, err := fl.options()
		if err != nil {
			return err
		}
		if err := fl.read(cmd.Context(), a, filter, &o); err != nil {
			return err
		}
		if !a.JSON && !fl.quiet {
			o.Progress = progress(os.Stderr)
		}
		rep, err := Run(cmd.Context(), o)
		if err != nil {
			return err
		}
		if a.JSON {
			return cli.PrintJSON(os.Stdout, rep)
		}
		return rep.Print(os.Stdout)
	}
	return cmd
}

// options checks the flags.
func (fl *flags) options() (o Options, filter recording.Filter, err error) {
	var wrong cli.Complaints
	now := time.Now()
	filter.Model = fl.model
	filter.Since, err = recording.ParseMoment(fl.since, now)
	wrong.About("--since", err)
	filter.Until, err = recording.ParseMoment(fl.until, now)
	wrong.About("--until", err)
	wrong.When(!filter.Until.IsZero() && !filter.Since.Before(filter.Until), "--until is not after --since")
	c := &o.Changes
	c.Workers, err = ParseWorkers(fl.workers)
	wrong.About("--workers", err)
	c.Capacity, err = ParseAmount(fl.capacity, fl.tokenBytes)
	wrong.About("--capacity", err)
	c.Host, err = ParseAmount(fl.host, fl.tokenBytes)
	wrong.About("--host-tier", err)
	size, err := ParseAmount(fl.fleetSize, fl.tokenBytes)
	wrong.About("--fleet-capacity", err)
	wrong.When(size != nil && size.Factor > 0, "--fleet-capacity is a factor: give tokens or bytes")
	wrong.When(fl.file != "" && fl.fleet == "" && fl.fleetSize == "",
		"--file needs --fleet (indexer workers --json), or --fleet-capacity for the recorded workers")
	wrong.When(fl.tokenBytes < 0 || fl.tokenBytes > 1<<30, "--token-bytes is not from 0 to 1 GiB")
	wrong.When(fl.routers < 0 || fl.routers > 1024, "--routers is not from 0 to 1,024")
	wrong.When(fl.seeds < 1 || fl.seeds > 100, "--seeds is not from 1 to 100")
	wrong.When(fl.replays < 0 || fl.replays > 1024, "--parallel is not from 0 to 1,024")
	wrong.When(fl.most < leastRequests || fl.most > 1<<24, "--max-requests is not from %d to %d", leastRequests, 1<<24)
	c.Policy, c.Routers = fl.policy, fl.routers
	_, err = changedPolicy("", c)
	wrong.About("--policy", err)
	o.Routing = routing.DefaultConfig()
	if fl.routingConfig != "" {
		o.Routing, err = launch.ReadRouting(fl.routingConfig)
		wrong.About("--routing-config", err)
	}
	o.Seeds, o.Parallel, o.Selected = fl.seeds, fl.replays, fl.model != ""
	if o.Parallel == 0 {
		o.Parallel = runtime.GOMAXPROCS(0)
	}
	return o, filter, wrong.Usage()
}

// read reads the requests and the fleet.
func (fl *flags) read(ctx context.Context, a *remote.Target, filter recording.Filter, o *Options) error {
	limits := DefaultLimits()
	limits.Requests = fl.most
	o.Input = NewInput(limits, fl.model)
	var err error
	if fl.file != "" {
		err = withFile("--file", fl.file, func(r io.Reader) error { return o.Input.ReadFile(r, filter) })
	} else {
		err = readStream(ctx, a, filter, o.Input)
	}
	if err != nil {
		return err
	}
	switch {
	case fl.fleet != "":
		err = withFile("--fleet", fl.fleet, func(r io.Reader) (err error) {
			list := &api.WorkerList{}
			if err := json.NewDecoder(io.LimitReader(r, maxFleet)).Decode(list); err != nil {
				return fmt.Errorf("no output of indexer workers --json: %w", err)
			}
			o.Fleet, err = FleetOf(list, o.Input.Model())
			return err
		})
	case fl.file != "":
		o.Fleet = o.Input.Fleet()
	default:
		list, asked := remote.Ask(ctx, a, func(ctx context.Context, c *client.Client) (*api.WorkerList, error) {
			return c.Workers(ctx)
		})
		if asked != nil {
			return a.Refused(fmt.Errorf("list the workers: %w", asked))
		}
		o.Fleet, err = FleetOf(list, o.Input.Model())
	}
	if err == nil && fl.fleetSize != "" {
		size, _ := ParseAmount(fl.fleetSize, fl.tokenBytes) // checked by options
		for i := range o.Fleet.Workers {
			o.Fleet.Workers[i].DeviceBlocks = size.Tokens / o.Input.BlockSize()
		}
	}
	return err
}

// maxFleet bounds the bytes of a list of workers.
const maxFleet = 256 << 20

// readStream reads the recorded requests in JetStream.
func readStream(ctx context.Context, a *remote.Target, filter recording.Filter, in *Input) error {
	return a.ReachNATS(ctx, func(_ context.Context, conn *jetstream.Conn) error {
		sum, err := recording.Read(ctx, jetstream.OpenRecording(conn, a.Namespace), filter, in.Add)
		if errors.Is(err, jetstream.ErrNotFound) {
			return fmt.Errorf("namespace %q has no recorded requests: start indexers with --record", a.Namespace)
		}
		in.DroppedByNode, in.Unreadable = int(sum.Dropped), int(sum.Unreadable)
		return remote.Denied(err)
	})
}

// withFile opens a file.
func withFile(flag, path string, read func(io.Reader) error) error {
	f, err := os.Open(path)
	if err != nil {
		return cli.UsageErrorf("%s: %w", flag, err)
	}
	defer f.Close()
	if err := read(f); err != nil {
		return fmt.Errorf("%s: %s: %w", flag, path, err)
	}
	return nil
}

// progress prints a line at the start of each replay.
func progress(w io.Writer) func(string) {
	var lock sync.Mutex
	begun := time.Now()
	return func(what string) {
		lock.Lock()
		defer lock.Unlock()
		cli.Fprintf(w, "%5.1fs  %s\n", time.Since(begun).Seconds(), what)
	}
}

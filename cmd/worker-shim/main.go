// Command worker-shim carries one inference engine's KV-cache events into kvatlas.
package main

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/ingest/pods"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/internal/ingest/source"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/simulate"
)

func main() { os.Exit(cli.Main(rootCommand())) }

func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "worker-shim",
		Short: "Carry an inference engine's KV-cache events into kvatlas",
	}
	return cli.Group(root, runCommand(), podsCommand(), simulate.Command())
}

func runCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "run --engine tcp://HOST:PORT --worker ID --model M --block-size N | --engine-http http://HOST:PORT",
		Short: "Publish one engine rank's events until stopped",
		Long: `Hear one engine rank's KV-cache events on its ZeroMQ socket and publish them to the log, each
acknowledged. It keeps no file: when it starts again it goes on where its own last message in the log says. With
--replay, the engine's replay endpoint, nothing is lost while it is away, as long as the engine's replay buffer
reaches back; without it a gap clears what the rank was known to hold.

One process shims as many data-parallel ranks as --ranks says: rank N has --engine's port + N and --replay's + N, which
is how vLLM and SGLang number them. vLLM publishes with
  --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",` +
			`"replay_endpoint":"tcp://*:5657"}'

With --engine-http alone all of that is asked of the engine: SGLang says it, and vLLM from 0.32 on. What flags say
counts more. The worker is called HOST:PORT then, with this host's name in place of a loopback address. If the engine
comes back with other settings they are taken.

With --listen and without --worker any number of engines dial this shim. The topic of an engine's messages,
kv@IP:PORT@MODEL, kv@IP@MODEL or kv@POD@MODEL, names its worker and model.

With --source mooncake it is no engine's shim but a shared store's: it passes on what a Mooncake master says of its
objects, for indexers to know without asking. It needs --engine and --master alone.`,
		Example: `  worker-shim run --engine tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5657 --worker w1 ` +
			`--model llama --block-size 16
  worker-shim run --engine-http http://127.0.0.1:8000
  worker-shim run --listen --engine tcp://0.0.0.0:5557 --block-size 16
  worker-shim run --source mooncake --engine tcp://mooncake:5557 --master mooncake:9003`,
		Args: cobra.NoArgs,
	}
	o := newOptions(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		log, err := o.logger(os.Stderr)
		if err != nil {
			return err
		}
		if o.shim.Source == source.Mooncake {
			return o.limited(log, func() error { return o.runStore(cmd.Context(), log) })
		}
		var wrong cli.Complaints
		o.check(&wrong)
		check, run := o.shim.Check, o.shim.Run
		if o.byTopic() || source.Named(o.shim.Source) {
			many := &source.Source{Shim: o.shim, Settings: o.source}
			check, run = many.Check, many.Run
		}
		wrong = append(wrong, check())
		if err := wrong.Usage(); err != nil {
			return err
		}
		return o.process(cmd.Context(), log, func() error { return o.run(cmd.Context(), log, run) })
	}
	return cmd
}

func podsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pods --selector LABELS | --pool NAME",
		Short: "Publish the events of all engines in the pods with these labels",
		Long: `Watch the pods with these labels and run the shims of their engines in this process. No pod needs a
sidecar. In the flags, POD_IP, POD_NAME and POD_NAMESPACE stand for each pod's own. By default each engine is asked at
http://POD_IP:8000 for its settings (SGLang; vLLM from 0.32 on), and its worker is called POD_NAME.

A pod that is deleted or terminates loses its registration at once. Several replicas with the same --share-as share the
pods. It needs the rights to list and watch pods and, with --share-as, to get, list, watch, create, update and delete
Leases.`,
		Example: `  worker-shim pods --selector app=vllm
  worker-shim pods --pool llama --share-as llama-shims
  worker-shim pods --selector app=vllm --engine tcp://POD_IP:5557 --replay tcp://POD_IP:5657 --model llama ` +
			`--block-size 16`,
		Args: cobra.NoArgs,
	}
	o, p := newOptions(cmd.Flags()), &pods.Settings{}
	o.shim.Figures.MayBeEmpty = true
	rows := podRows(p)
	rows.Add(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		log, err := o.logger(os.Stderr)
		if err != nil {
			return err
		}
		var wrong cli.Complaints
		p.Kube = o.source.Kube
		p.SetDefaults(o.shim)
		o.check(&wrong)
		rows.Check(&wrong)
		wrong.When(source.Named(o.shim.Source) || o.shim.Source == source.Mooncake, "--source %s is not for pods",
			o.shim.Source)
		wrong = append(wrong, p.Check(o.shim))
		if err := wrong.Usage(); err != nil {
			return err
		}
		return o.process(cmd.Context(), log, func() error {
			return p.Run(cmd.Context(), o.shim, func(name string) (*jetstream.Conn, error) {
				return o.connect(cmd.Context(), log, name, "the engines' events wait", false)
			}, log)
		})
	}
	return cmd
}

// process runs a shim with its traces and its HTTP port.
func (o *options) process(ctx context.Context, log *slog.Logger, run func() error) error {
	if err := o.http.Check(); err != nil {
		return err
	}
	if err := o.traces.Check(); err != nil {
		return cli.UsageErrorf("%w", err)
	}
	tracer, tracesEnd, err := o.traces.Open(ctx, "kvatlas-worker-shim", o.shim.Worker, log)
	if err != nil {
		return err
	}
	defer tracesEnd()
	shared := o.shim.Shared
	shared.Tracer, shared.Figures.Tracer = tracer, tracer
	shared.Figures.QueueMost = o.shim.QueueBytes
	if o.byTopic() {
		shared.Figures.QueueMost = (&source.Source{Shim: o.shim, Settings: o.source}).RankQueue()
	}
	httpStop, err := o.http.Serve(&shared.Figures, log)
	if err != nil {
		return err
	}
	defer httpStop()
	return o.limited(log, run)
}

// processors bounds the processors of a shim. A single processor carries a million blocks a second.
const processors = 4

// limited runs with --debug-listen, with few processors and little memory.
func (o *options) limited(log *slog.Logger, run func() error) error {
	if err := o.debug.Check(); err != nil {
		return err
	}
	debugStop, err := o.debug.Serve(log)
	if err != nil {
		return err
	}
	defer debugStop()
	cli.LimitProcessors(processors)
	cli.SaveMemory(cli.ShimRoom)
	return run()
}

// runStore runs the shim of a shared store.
func (o *options) runStore(ctx context.Context, log *slog.Logger) error {
	s := &source.Store{Shim: o.shim, Master: o.master}
	if err := errors.Join(s.Check(), o.checkStore()); err != nil {
		return err
	}
	log = log.With("store", o.master)
	conn, err := o.connect(ctx, log, "of store "+o.master, "indexers poll the store", true)
	if err != nil {
		return host.IgnoreEnd(ctx, err)
	}
	defer conn.Close()
	if err := s.Run(ctx, conn, log); err != nil {
		return err
	}
	log.Info("stopped")
	return nil
}

// run runs the shim of an engine or a source with a connection to NATS.
func (o *options) run(ctx context.Context, log *slog.Logger,
	run func(context.Context, *jetstream.Conn, *slog.Logger) error) error {
	o.shim.LogPassed(log)
	conn, err := o.connect(ctx, log, cmp.Or(o.shim.Worker, o.shim.EngineHTTP), "the engine's events wait", false)
	if err != nil {
		return host.IgnoreEnd(ctx, err)
	}
	defer conn.Close()
	if err := run(ctx, conn, log); err != nil {
		return err
	}
	log.Info("stopped")
	return nil
}

// connect waits for a NATS server. name is the name of the connection, and without is the consequence of a lost
// connection in the log.
func (o *options) connect(ctx context.Context, log *slog.Logger, name, without string, core bool) (*jetstream.Conn,
	error) {
	options, err := o.nats.Options("kvatlas shim " + name)
	if err != nil {
		return nil, err
	}
	waiting := host.Limiter{Every: o.shim.LogRepeat}
	options.Core, options.Wait = core, true // a shim may start before all other programs
	options.Disconnected = func(err error) {
		log.Warn("NATS connection lost; "+without, "error", err, "what_to_do",
			"see that the NATS server runs; it is dialled until it answers")
	}
	options.Reconnected = func(url string) {
		log.Info("NATS connection is back", "server", url)
		o.shim.Reconnects.Reconnected()
	}
	options.AsyncError = func(err error) { log.Error("NATS", "error", err, "what_to_do", cli.AsyncAdvice(err)) }
	options.Waiting = func(err error) {
		event, todo := o.nats.Away(err)
		waiting.WarnTo(log, event, "nats", o.nats.Shown(), "error", err, "what_to_do", todo)
	}
	return jetstream.Connect(ctx, options)
}

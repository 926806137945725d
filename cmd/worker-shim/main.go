// Command worker-shim publishes the KV-cache events of an inference engine to kvatlas.
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
		Short: "Publish the events of an engine's rank until stopped",
		Long: `Receive an engine rank's KV-cache events on a ZeroMQ socket, and publish the events to the log with
acknowledgements. The shim keeps no file: after a restart the shim continues after the last own message in the log.
With --replay, the engine's replay endpoint, no event is lost during an absence of the shim, as far as the engine's
replay buffer reaches back. Without --replay, a gap clears all blocks of the rank.

A process serves --ranks data-parallel ranks: rank N has the port of --engine + N and the port of --replay + N, as
numbered by vLLM and SGLang. vLLM publishes with
  --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",` +
			`"replay_endpoint":"tcp://*:5657"}'

With --engine-http alone, the shim reads all settings from the engine: SGLang reports them, and vLLM from 0.32 on. Flags
have precedence. The default name of the worker is then HOST:PORT, with this host's name in place of a loopback address.
If the engine restarts with new settings, the shim uses the new settings.

With --listen and without --worker, any number of engines dial this shim. The topic of an engine's messages,
kv@IP:PORT@MODEL, kv@IP@MODEL or kv@POD@MODEL, names the worker and the model.

With --source mooncake, the shim serves a shared store in place of an engine: the shim publishes the changes of the
objects at a Mooncake master, so that indexers need no requests to the store. Only --engine and --master apply.`,
		Example: `  worker-shim run --engine tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5657 --worker w1 ` +
			`--model llama --block-size 16
  worker-shim run --engine-http http://127.0.0.1:8000
  worker-shim run --listen --engine tcp://0.0.0.0:5557 --block-size 16
  worker-shim run --source mooncake --engine tcp://mooncake:5557 --master mooncake:9003`,
		Args: cobra.NoArgs,
	}
	o := newOptions(cmd.Flags())
	cli.Sections(cmd.Flags(), o.sections()...)
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
		Use:   "pods --selector LABELS | --inference-pool NAME",
		Short: "Publish the events of all engines in the pods with these labels",
		Long: `Watch the pods with the labels and run the shims of the engines in this process. No pod needs a sidecar. In the
flags, POD_IP, POD_NAME and POD_NAMESPACE stand for the values of a pod. By default the shim reads an engine's settings
from http://POD_IP:8000 (SGLang; vLLM from 0.32 on), and the worker's name is POD_NAME.

A deleted or terminating pod loses the registration at once. Several replicas with the same --share-as share the pods.
The process needs the rights to list and watch pods and, with --share-as, to get, list, watch, create, update and delete
Leases.`,
		Example: `  worker-shim pods --selector app=vllm
  worker-shim pods --inference-pool llama --share-as llama-shims
  worker-shim pods --selector app=vllm --engine tcp://POD_IP:5557 --replay tcp://POD_IP:5657 --model llama ` +
			`--block-size 16`,
		Args: cobra.NoArgs,
	}
	o, p := newOptions(cmd.Flags()), &pods.Settings{}
	o.shim.Figures.MayBeEmpty = true
	rows := podRows(p)
	rows.Add(cmd.Flags())
	cli.Sections(cmd.Flags(), append([]cli.Section{{Title: "Pods", Names: rows.Names()}}, o.sections()...)...)
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

// process runs a shim with traces and an HTTP port.
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
	options.Core, options.Wait = core, true // a shim may start before all programs of kvatlas
	options.Disconnected = func(err error) {
		log.Warn("NATS connection lost; "+without, "error", err, "what_to_do",
			"check that the NATS server runs; the program dials until the server answers")
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

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/ingest/kube"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// podFlags name the pods whose engines are shimmed.
type podFlags struct {
	selector, pool, namespace, group, replica string
}

// allNamespaces is the value of --pods-namespace for every namespace.
const allNamespaces = "*"

func addPodFlags(f *pflag.FlagSet) *podFlags {
	p := &podFlags{}
	f.StringVar(&p.selector, "selector", "", "labels of the pods, such as app=vllm (required, or --pool)")
	f.StringVar(&p.pool, "pool", "", "InferencePool whose selector and first port are used")
	f.StringVar(&p.namespace, "pods-namespace", "",
		"Kubernetes namespace of the pods; * for all (default: that of this pod)")
	f.StringVar(&p.group, "share-as", "",
		"name of a group of replicas that share the pods, by Leases in this pod's namespace (default: this process takes "+
			"all pods)")
	f.StringVar(&p.replica, "replica", "", "name of this replica in the group (default: the host's name)")
	return p
}

// addKubeFlags adds the flags that name a Kubernetes API server.
func addKubeFlags(f *pflag.FlagSet, c *kube.Config) {
	f.StringVar(&c.URL, "kube-api", "",
		"of pods and of dynamo-zmq: https://HOST:PORT of the Kubernetes API server (default: that of this pod)")
	f.StringVar(&c.TokenFile, "kube-token-file", "", "file with the token for it (default: that of the service account)")
	f.StringVar(&c.CAFile, "kube-ca", "",
		"file with the authorities that vouch for it (default: that of the service account)")
}

func podsCommand() *cobra.Command {
	r := &running{shared: &shared{reconnects: &host.Reconnects{}, figures: &fleetFigures{mayBeEmpty: true}}}
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
	p := addPodFlags(cmd.Flags())
	logger := r.addFlags(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		log, err := logger(os.Stderr)
		if err != nil {
			return err
		}
		if err := p.check(r); err != nil {
			return err
		}
		return r.process(cmd.Context(), log, func() error { return r.runPods(cmd.Context(), p, log) })
	}
	return cmd
}

// check fills in the defaults, and refuses flags with which no pod's engine could be shimmed.
func (p *podFlags) check(r *running) error {
	var wrong cli.Complaints
	wrong.When((p.selector == "") == (p.pool == ""), "give either --selector or --pool")
	wrong.When(p.pool != "" && p.namespace == allNamespaces, "--pool is in one namespace, not in --pods-namespace %s",
		allNamespaces)
	wrong.When(r.fleet() || r.source == sourceMooncake, "--source %s is not for pods", r.source)
	wrong.When(r.listen, "--listen is not for pods")
	wrong.When(p.replica != "" && p.group == "", "--replica says nothing without --share-as")
	if _, err := kube.New(r.kube); err != nil {
		wrong.About("--kube-api", err)
	}
	if p.namespace == "" {
		p.namespace = kube.OwnNamespace()
	}
	if r.engine == "" && r.engineHTTP == "" {
		r.engineHTTP = "http://POD_IP:8000"
	}
	if r.instance == "" {
		r.instance = "POD_NAME"
		if p.namespace == allNamespaces {
			r.instance = "POD_NAMESPACE/POD_NAME"
		}
	}
	wrong.When(!strings.Contains(r.instance, "POD_NAME") && !strings.Contains(r.instance, "POD_IP"),
		"--worker %q is the same for all pods: it needs POD_NAME or POD_IP", r.instance)
	for _, f := range []struct{ name, value string }{{"--engine", r.engine}, {"--engine-http", r.engineHTTP}} {
		wrong.When(f.value != "" && !strings.Contains(f.value, "POD_IP"),
			"%s %q is the same for all pods: it needs POD_IP", f.name, f.value)
	}
	if p.group != "" && p.replica == "" {
		name, err := os.Hostname()
		wrong.About("--replica", err)
		p.replica = name
	}
	if err := wrong.Usage(); err != nil {
		return err
	}
	var sample kube.Pod
	sample.Meta.Name, sample.Meta.Namespace, sample.Status.PodIP = "pod", "default", "192.0.2.1"
	_, err := r.ofPod(&sample)
	return err
}

// ofPod returns the settings of the shim of a pod's engine.
func (r *running) ofPod(pod *kube.Pod) (*running, error) {
	host := pod.Status.PodIP
	if ip := net.ParseIP(host); ip != nil && ip.To4() == nil {
		host = "[" + host + "]"
	}
	// POD_NAMESPACE comes first: POD_NAME is its beginning
	fill := strings.NewReplacer("POD_IP", host, "POD_NAMESPACE", pod.Meta.Namespace, "POD_NAME", pod.Meta.Name)
	one := *r
	one.spec = nil
	one.stopWait = 0 // the API server reports the end of a pod, and the next shim of the pod waits for this one
	for _, text := range []*string{&one.engine, &one.replay, &one.engineSnapshot, &one.engineHTTP, &one.instance} {
		*text = fill.Replace(*text)
	}
	if err := one.check(); err != nil {
		return nil, err
	}
	spec := *one.spec
	spec.Endpoint = fill.Replace(spec.Endpoint)
	one.spec = &spec
	return &one, nil
}

// errPodGone is the cause of the end of a shim whose pod is deleted or terminates.
var errPodGone = errors.New("the pod is gone")

// podShim is the shim of a pod's engine.
type podShim struct {
	pod    kube.Pod
	worker string
	stop   context.CancelCauseFunc
	done   chan struct{}
}

func (s *podShim) ended() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// podFleet runs the shims of the pods that this replica owns. The goroutine of run owns it.
type podFleet struct {
	cfg    *running
	conn   *jetstream.Conn
	log    *slog.Logger
	pods   *kube.Copy[kube.Pod]
	member *kube.Membership // nil: this process takes all pods
	shims  map[string]*podShim
	ending map[string]*podShim // by worker: its successor waits for it
}

// runPods shims the engines of all pods until ctx is done.
func (r *running) runPods(ctx context.Context, p *podFlags, log *slog.Logger) error {
	client, err := kube.New(r.kube)
	if err != nil {
		return err
	}
	trouble := limiter{every: r.logWindow}
	failed := func(err error) {
		trouble.warn(log, "the Kubernetes API server does not answer as needed; known pods are served meanwhile", "error",
			err, "what_to_do", "see that it runs, and that this service account may list and watch pods and write Leases")
	}
	if p.pool != "" {
		if err := r.readPool(ctx, client, p, failed); err != nil {
			return ignoreEnd(ctx, err)
		}
	}
	conn, err := r.connect(ctx, log, "pods "+cmp.Or(p.selector, p.pool), "the engines' events wait", false)
	if err != nil {
		return ignoreEnd(ctx, err)
	}
	defer conn.Close()
	namespace := p.namespace
	if namespace == allNamespaces {
		namespace = ""
	}
	f := &podFleet{cfg: r, conn: conn, log: log, shims: map[string]*podShim{}, ending: map[string]*podShim{},
		pods: kube.NewCopy[kube.Pod](client, kube.Pods(namespace, p.selector), failed)}
	watching, stop := context.WithCancel(context.WithoutCancel(ctx))
	background := []func(context.Context){f.pods.Run}
	if p.group != "" {
		f.member = kube.NewMembership(client, kube.OwnNamespace(), p.group, p.replica, failed)
		background = append(background, f.member.Run)
	}
	ended := make(chan struct{}, len(background))
	for _, run := range background {
		go func() {
			run(watching)
			ended <- struct{}{}
		}()
	}
	log.Info("pods are watched", "selector", p.selector, "namespace", p.namespace, "share_as", p.group)
	f.run(ctx)
	stop() // after the shims: another replica takes the pods when the Lease is deleted
	for range background {
		<-ended
	}
	return nil
}

// readPool takes the selector and the port of an InferencePool, for which it waits.
func (r *running) readPool(ctx context.Context, client *kube.Client, p *podFlags, failed func(error)) error {
	for {
		pool, err := client.Pool(ctx, p.namespace, p.pool)
		if err == nil {
			labels := pool.Spec.Selector.MatchLabels
			for name, value := range labels {
				p.selector += "," + name + "=" + value
			}
			if p.selector = strings.TrimPrefix(p.selector, ","); p.selector == "" {
				return fmt.Errorf("InferencePool %s selects no pods", p.pool)
			}
			if ports := pool.Spec.TargetPorts; len(ports) > 0 && r.engineHTTP == "http://POD_IP:8000" {
				r.engineHTTP = "http://POD_IP:" + strconv.Itoa(ports[0].Number)
			}
			return nil
		}
		failed(err)
		if !loop.Wait(ctx, 5*time.Second) {
			return ctx.Err()
		}
	}
}

// lookPods is how often expired Leases of other replicas are looked for.
const lookPods = time.Second

// run starts and stops shims until ctx is done, and waits for their ends.
func (f *podFleet) run(ctx context.Context) {
	var members <-chan struct{}
	if f.member != nil {
		members = f.member.Changed()
	}
	tick := time.NewTicker(lookPods)
	defer tick.Stop()
	for ctx.Err() == nil {
		if list, err := f.pods.List(); err == nil {
			f.follow(ctx, list)
		}
		select {
		case <-f.pods.Changed():
		case <-members:
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	for _, s := range f.shims {
		<-s.done
	}
	for _, s := range f.ending {
		<-s.done
	}
}

// follow makes the shims those of the pods in the list that this replica owns.
func (f *podFleet) follow(ctx context.Context, list []kube.Pod) {
	var members []string
	if f.member != nil {
		members = f.member.Members(time.Now())
	}
	runs, own := map[string]bool{}, map[string]bool{}
	list = slices.DeleteFunc(list, func(pod kube.Pod) bool { return !pod.Runs() })
	for i := range list {
		key := podKey(&list[i])
		runs[key] = true
		own[key] = members == nil || f.member.Owns(members, list[i].Meta.UID)
	}
	for key, s := range f.shims {
		switch {
		case !runs[key]:
			s.stop(errPodGone)
		case !own[key]:
			s.stop(nil)
		default:
			continue
		}
		delete(f.shims, key)
		f.ending[s.worker] = s
	}
	for worker, s := range f.ending {
		if s.ended() {
			delete(f.ending, worker)
		}
	}
	for i := range list {
		pod := &list[i]
		if key := podKey(pod); own[key] && f.shims[key] == nil {
			f.start(ctx, key, pod, len(own))
		}
	}
}

// podKey is different for a pod whose address has changed.
func podKey(pod *kube.Pod) string { return pod.Meta.UID + " " + pod.Status.PodIP }

// start starts the shim of a pod, unless that of its predecessor has not ended. of is the number of pods.
func (f *podFleet) start(ctx context.Context, key string, pod *kube.Pod, of int) {
	log := f.log.With("pod", pod.Meta.Name)
	one, err := f.cfg.ofPod(pod)
	if err != nil {
		log.Error("the engine of a pod cannot be served", "error", err, "what_to_do", "see the flags")
		return
	}
	if f.ending[one.instance] != nil {
		return
	}
	one.queueBytes, one.whole = max(leastQueue, f.cfg.queueBytes/max(of, 1)), ctx
	ctx, stop := context.WithCancelCause(ctx)
	s := &podShim{pod: *pod, worker: one.instance, stop: stop, done: make(chan struct{})}
	f.shims[key] = s
	go func() {
		defer close(s.done)
		defer stop(nil)
		for {
			err := one.runOn(ctx, f.conn, log)
			if ctx.Err() != nil {
				return
			}
			pause := refusedFor
			if f.member != nil && errors.Is(err, shim.ErrFenced) {
				pause = lookPods // the other replica ends its shim once it sees that this one owns the pod
				log.Warn("another replica serves this pod; it is waited for", "error", err,
					"what_to_do", "nothing: that replica ends its shim within seconds")
			} else if err != nil {
				log.Error("the engine of a pod cannot be served; it is tried again", "after", pause, "error", err,
					"what_to_do", streamAdvice(err, events.WorkerID(one.instance), one.model))
			}
			if !loop.Wait(ctx, pause) {
				return
			}
		}
	}()
}

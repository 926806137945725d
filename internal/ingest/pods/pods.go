// Package pods shims the engines in the pods of a Kubernetes cluster from one process. No pod needs a sidecar. Several
// replicas of the process share the pods by Leases.
package pods

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/base/usage"
	"github.com/kvatlas/kvatlas/internal/ingest/kube"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Settings select the pods with engines to shim.
type Settings struct {
	Selector, Pool string // one of the two
	Namespace      string // AllNamespaces for all
	Group, Replica string // of the replicas with a share of the pods; empty: this process serves all pods
	Kube           kube.Config
}

// AllNamespaces is the value of Settings.Namespace for every namespace.
const AllNamespaces = "*"

// defaultHTTP is the default of --engine-http.
const defaultHTTP = "http://POD_IP:8000"

// SetDefaults fills in empty settings.
func (p *Settings) SetDefaults(s *host.Shim) {
	if p.Namespace == "" {
		p.Namespace = kube.OwnNamespace()
	}
	if s.Engine == "" && s.EngineHTTP == "" {
		s.EngineHTTP = defaultHTTP
	}
	if s.Worker == "" {
		s.Worker = "POD_NAME"
		if p.Namespace == AllNamespaces {
			s.Worker = "POD_NAMESPACE/POD_NAME"
		}
	}
}

// Check rejects settings without an engine in a pod. The error is a usage error.
func (p *Settings) Check(s *host.Shim) error {
	var wrong usage.Complaints
	wrong.When((p.Selector == "") == (p.Pool == ""), "give either --selector or --inference-pool")
	wrong.When(p.Pool != "" && p.Namespace == AllNamespaces,
		"--inference-pool is in one namespace, not in --pods-namespace %s",
		AllNamespaces)
	wrong.When(s.Listen, "--listen is not for pods")
	wrong.When(p.Replica != "" && p.Group == "", "--replica has no effect without --share-as")
	if _, err := kube.New(p.Kube); err != nil {
		wrong.About("--kube-api", err)
	}
	wrong.When(!strings.Contains(s.Worker, "POD_NAME") && !strings.Contains(s.Worker, "POD_IP"),
		"--worker %q is the same for all pods: use POD_NAME or POD_IP", s.Worker)
	for _, f := range []struct{ name, value string }{{"--engine", s.Engine}, {"--engine-http", s.EngineHTTP}} {
		wrong.When(f.value != "" && !strings.Contains(f.value, "POD_IP"),
			"%s %q is the same for all pods: use POD_IP", f.name, f.value)
	}
	if p.Group != "" && p.Replica == "" {
		name, err := os.Hostname()
		wrong.About("--replica", err)
		p.Replica = name
	}
	if err := wrong.Usage(); err != nil {
		return err
	}
	var sample kube.Pod
	sample.Meta.Name, sample.Meta.Namespace, sample.Status.PodIP = "pod", "default", "192.0.2.1"
	_, err := ofPod(s, &sample)
	return err
}

// ofPod returns the shim of a pod's engine.
func ofPod(s *host.Shim, pod *kube.Pod) (*host.Shim, error) {
	address := pod.Status.PodIP
	if ip := net.ParseIP(address); ip != nil && ip.To4() == nil {
		address = "[" + address + "]"
	}
	// POD_NAMESPACE comes first: POD_NAME is its beginning
	fill := strings.NewReplacer("POD_IP", address, "POD_NAMESPACE", pod.Meta.Namespace, "POD_NAME", pod.Meta.Name)
	one, spec := *s, *s.Spec
	one.Spec = &spec
	one.StopWait = 0 // the API server reports the end of a pod, and the next shim of the pod waits for this shim
	for _, text := range []*string{&one.Engine, &one.Replay, &one.EngineHTTP, &one.Worker,
		&spec.Endpoint} {
		*text = fill.Replace(*text)
	}
	if err := setRole(&spec, pod); err != nil {
		return nil, err
	}
	return &one, one.Check()
}

// roles are the values of the label llm-d.ai/role (llm-d/llm-d-router › docs/disaggregation.md).
var roles = map[string]api.Role{"": "", "prefill": api.RolePrefill, "encode-prefill": api.RolePrefill,
	"decode": api.RoleDecode, "encode-decode": api.RoleDecode, "encode": api.RoleEncode,
	"prefill-decode": api.RoleAggregated, "encode-prefill-decode": api.RoleAggregated, "both": api.RoleAggregated}

// setRole sets the role by the pod's label, and the bootstrap port by the annotation of SGLang's router. Flags take
// precedence.
func setRole(spec *api.WorkerSpec, pod *kube.Pod) error {
	if spec.Role == "" {
		role, known := roles[pod.Meta.Labels.Role]
		if !known {
			return fmt.Errorf("the pod's label llm-d.ai/role is %.40q; it may be %s", pod.Meta.Labels.Role,
				strings.Join(slices.Sorted(maps.Keys(roles))[1:], ", "))
		}
		spec.Role = role
	}
	if text := pod.Meta.Annotations.BootstrapPort; text != "" && spec.BootstrapPort == 0 {
		port, err := strconv.ParseUint(text, 10, 16)
		if err != nil || port == 0 {
			return fmt.Errorf("the pod's annotation sglang.ai/bootstrap-port is %.40q; it must be a port from 1 to 65535", text)
		}
		spec.BootstrapPort = uint32(port)
	}
	return nil
}

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

// fleet runs the shims of this replica's pods. The goroutine of run owns the fields.
type fleet struct {
	shim   *host.Shim
	conn   *jetstream.Conn
	log    *slog.Logger
	pods   *kube.Copy[kube.Pod]
	member *kube.Membership // nil: this process serves all pods
	shims  map[string]*podShim
	ending map[string]*podShim // by worker: a successor waits for the end
}

// Run shims the engines of all pods until ctx is done. connect waits for a connection to NATS.
func (p *Settings) Run(ctx context.Context, s *host.Shim, connect func(name string) (*jetstream.Conn, error),
	log *slog.Logger) error {
	client, err := kube.New(p.Kube)
	if err != nil {
		return err
	}
	trouble := host.Limiter{Every: s.LogRepeat}
	failed := func(err error) {
		trouble.WarnTo(log, "the Kubernetes API server does not answer as needed; known pods are served meanwhile", "error",
			err, "what_to_do", "check the API server, and the right of this service account to list and watch pods and to write Leases")
	}
	if p.Pool != "" {
		if err := p.readPool(ctx, client, s, failed); err != nil {
			return host.IgnoreEnd(ctx, err)
		}
	}
	conn, err := connect("pods " + cmp.Or(p.Selector, p.Pool))
	if err != nil {
		return host.IgnoreEnd(ctx, err)
	}
	defer conn.Close()
	namespace := p.Namespace
	if namespace == AllNamespaces {
		namespace = ""
	}
	f := &fleet{shim: s, conn: conn, log: log, shims: map[string]*podShim{}, ending: map[string]*podShim{},
		pods: kube.NewCopy[kube.Pod](client, kube.Pods(namespace, p.Selector), failed)}
	watching, stop := context.WithCancel(context.WithoutCancel(ctx))
	var background sync.WaitGroup
	background.Go(func() { f.pods.Run(watching) })
	if p.Group != "" {
		f.member = kube.NewMembership(client, kube.OwnNamespace(), p.Group, p.Replica, failed)
		background.Go(func() { f.member.Run(watching) })
	}
	log.Info("pods are watched", "selector", p.Selector, "namespace", p.Namespace, "share_as", p.Group)
	f.run(ctx)
	stop() // after the shims: the deletion of the Lease gives the pods to another replica
	background.Wait()
	return nil
}

// readPool waits for an InferencePool, and reads the selector and the port.
func (p *Settings) readPool(ctx context.Context, client *kube.Client, s *host.Shim, failed func(error)) error {
	for {
		pool, err := client.Pool(ctx, p.Namespace, p.Pool)
		if err == nil {
			labels := pool.Spec.Selector.MatchLabels
			for name, value := range labels {
				p.Selector += "," + name + "=" + value
			}
			if p.Selector = strings.TrimPrefix(p.Selector, ","); p.Selector == "" {
				return fmt.Errorf("InferencePool %s selects no pods", p.Pool)
			}
			if ports := pool.Spec.TargetPorts; len(ports) > 0 && s.EngineHTTP == defaultHTTP {
				s.EngineHTTP = "http://POD_IP:" + strconv.Itoa(ports[0].Number)
			}
			return nil
		}
		failed(err)
		if !loop.Wait(ctx, 5*time.Second) {
			return ctx.Err()
		}
	}
}

// lookPods is the time between two looks for expired Leases of other replicas.
const lookPods = time.Second

// run starts and stops shims until ctx is done, and waits for their ends.
func (f *fleet) run(ctx context.Context) {
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

// follow starts and stops shims according to the list of pods. This replica serves its own pods.
func (f *fleet) follow(ctx context.Context, list []kube.Pod) {
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
			s.stop(host.ErrEngineGone)
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

// podKey returns the key of a pod with its address and role. A pod with a new address or role has a new key.
func podKey(pod *kube.Pod) string {
	return pod.Meta.UID + " " + pod.Status.PodIP + " " + pod.Meta.Labels.Role
}

// start starts the shim of a pod, unless an earlier shim of the worker still runs. of is the number of pods.
func (f *fleet) start(ctx context.Context, key string, pod *kube.Pod, of int) {
	log := f.log.With("pod", pod.Meta.Name)
	one, err := ofPod(f.shim, pod)
	if err != nil {
		log.Error("the engine of a pod cannot be served", "error", err, "what_to_do", "see the flags")
		return
	}
	if f.ending[one.Worker] != nil {
		return
	}
	one.QueueBytes, one.Process = max(host.LeastQueue, f.shim.QueueBytes/max(of, 1)), ctx
	ctx, stop := context.WithCancelCause(ctx)
	s := &podShim{pod: *pod, worker: one.Worker, stop: stop, done: make(chan struct{})}
	f.shims[key] = s
	go func() {
		defer close(s.done)
		defer stop(nil)
		for {
			err := one.RunOn(ctx, f.conn, log)
			if ctx.Err() != nil {
				return
			}
			pause := host.RetryAfter
			if f.member != nil && errors.Is(err, shim.ErrFenced) {
				pause = lookPods // the other replica ends its shim when it finds the new owner of the pod
				log.Warn("another replica serves this pod; waiting for the end of its shim", "error", err,
					"what_to_do", "nothing: the replica ends its shim within seconds")
			} else if err != nil {
				log.Error("the engine of a pod cannot be served; it is tried again", "after", pause, "error", err,
					"what_to_do", host.Advice(err, events.WorkerID(one.Worker), one.Model))
			}
			if !loop.Wait(ctx, pause) {
				return
			}
		}
	}()
}

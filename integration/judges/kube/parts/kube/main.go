// Command kube contains the programs of a small Kubernetes: etcd, the control plane, the programs of a node and
// kubectl. The name of the executable or the first argument selects the program.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	name := filepath.Base(os.Args[0])
	programs := map[string]func() *cobra.Command{
		"kube-apiserver":          apiserver.NewAPIServerCommand,
		"kube-controller-manager": controllers.NewControllerManagerCommand,
		"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
		"kube-proxy":              proxy.NewProxyCommand,
		// The kubelet registers signal handlers and panics with a context that signals cancel.
		"kubelet": func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
		"kubectl": kubectl.NewDefaultKubectlCommand,
	}
	if name != "etcd" && programs[name] == nil && len(os.Args) > 1 {
		os.Args = os.Args[1:]
		name = os.Args[0]
	}
	if name == "etcd" {
		etcdmain.Main(os.Args)
		return
	}
	command := programs[name]
	if command == nil {
		fmt.Fprintln(os.Stderr,
			"usage: kube etcd|kube-apiserver|kube-controller-manager|kube-scheduler|kube-proxy|kubelet|kubectl ...")
		os.Exit(2)
	}
	os.Exit(cli.Run(command()))
}

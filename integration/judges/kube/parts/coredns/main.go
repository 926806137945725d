// Command coredns is CoreDNS with the required plugins for the names of a Kubernetes cluster.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/ready"
)

func init() { dnsserver.Directives = []string{"errors", "log", "health", "ready", "kubernetes"} }

func main() { coremain.Run() }

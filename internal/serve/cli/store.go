package cli

import (
	"fmt"

	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// MasterFlags adds --l3-master and --l3-master-metrics-port: the master of a shared store, for configurations without
// an address. The returned function reads them once flags are parsed; without --l3-master there is no address.
func MasterFlags(f *pflag.FlagSet) func() (hicache.Master, error) {
	m := &hicache.Master{}
	f.StringVar(&m.Address, "l3-master", "",
		"master of the shared store where a configuration names none, as that of Dynamo's workers does not: HOST:PORT of its "+
			"RPC, or etcd://HOST:PORT;HOST:PORT of the etcd that says who leads")
	f.IntVar(&m.MetricsPort, "l3-master-metrics-port", 0, "port of the HTTP of --l3-master (default: 9003)")
	return func() (hicache.Master, error) {
		if m.Address == "" && m.MetricsPort != 0 {
			return *m, fmt.Errorf("--l3-master-metrics-port says nothing without --l3-master")
		}
		if err := m.Check(); err != nil {
			return *m, fmt.Errorf("--l3-master: %w", err)
		}
		return *m, nil
	}
}

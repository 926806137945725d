package cli

import (
	"fmt"

	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// MasterFlags adds --l3-master and --l3-master-metrics-port: the master of a shared store, for configurations without
// an address. The returned function reads the flags after they are parsed; without --l3-master the address is empty.
func MasterFlags(f *pflag.FlagSet) func() (hicache.Master, error) {
	m := &hicache.Master{}
	f.StringVar(&m.Address, "l3-master", "",
		"master of the shared store, if the configuration has none (as for Dynamo's workers): HOST:PORT of its "+
			"RPC, or etcd://HOST:PORT;HOST:PORT of the etcd with the current leader")
	f.IntVar(&m.MetricsPort, "l3-master-metrics-port", 0, "HTTP port of --l3-master (default: 9003)")
	return func() (hicache.Master, error) {
		if m.Address == "" && m.MetricsPort != 0 {
			return *m, fmt.Errorf("--l3-master-metrics-port has no effect without --l3-master")
		}
		if err := m.Check(); err != nil {
			return *m, fmt.Errorf("--l3-master: %w", err)
		}
		return *m, nil
	}
}

package hicache

import (
	"cmp"
	"fmt"
	"net"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/dial"
)

// Master is where a Mooncake master is found.
type Master struct {
	// Address is HOST:PORT of its RPC, of which only the host is used here, or etcd://HOST:PORT;HOST:PORT of the etcd in
	// which several masters write down who leads.
	Address     string `json:"master_server_address,omitempty"`
	MetricsPort int    `json:"master_metrics_port,omitempty"` // of its HTTP; 0 is 9003

	// ClusterID tells masters of one etcd apart: the MC_STORE_CLUSTER_ID of the engines and --cluster_id of the masters;
	// "" is Mooncake's default, mooncake_cluster.
	ClusterID string `json:"master_cluster_id,omitempty"`
}

// Election is where several masters write down who of them leads
// (kvcache-ai/Mooncake › mooncake-store/src/ha/leadership/backends/etcd/etcd_leader_coordinator.cpp).
type Election struct {
	Endpoints   []string // http://HOST:PORT of etcd's members
	Key         string   // its value is HOST:PORT of the leader's RPC
	MetricsPort int      // of each master's HTTP
}

const (
	etcdScheme       = "etcd"
	defaultClusterID = "mooncake_cluster"
	maxEndpoints     = 16 // of etcd
)

// host is the host of an address, which is HOST:PORT or HOST; an IPv6 address stands with or without brackets.
func (m Master) host() (host string, err error) {
	if host, _, err = dial.SplitHostPort(m.Address); err == nil {
		return host, nil
	}
	host = m.Address
	if inner, bracketed := strings.CutPrefix(host, "["); bracketed {
		host = strings.TrimSuffix(inner, "]")
	}
	return host, dial.CheckHost(host)
}

// http is the master's host:port for HTTP, or "" if no address is known, or only who leads is written down.
func (m Master) http() string {
	host, err := m.host()
	if m.Address == "" || err != nil {
		return ""
	}
	return net.JoinHostPort(host, fmt.Sprint(cmp.Or(m.MetricsPort, defaultMetricsPort)))
}

// endpoints are HOST:PORT of etcd's members; nil if the address is not of that form.
func (m Master) endpoints() (list []string) {
	scheme, rest, has := strings.Cut(m.Address, "://")
	if !has || scheme != etcdScheme {
		return nil
	}
	for part := range strings.SplitSeq(rest, ";") {
		if part = strings.TrimPrefix(strings.TrimSpace(part), "http://"); part != "" {
			list = append(list, part)
		}
	}
	return list
}

// where is host:port of the master's HTTP, or the etcd with the election and the cluster's name there; "" if there is
// no address.
func (m Master) where() string {
	list := m.endpoints()
	if list == nil {
		return m.http()
	}
	return etcdScheme + "://" + strings.Join(list, ";") + " " + cmp.Or(m.ClusterID, defaultClusterID)
}

// election is where the masters write down who leads; false if the address names one master.
func (m Master) election() (e Election, elected bool) {
	for _, endpoint := range m.endpoints() {
		e.Endpoints = append(e.Endpoints, "http://"+endpoint)
	}
	e.Key = "mooncake-store/" + strings.TrimSuffix(cmp.Or(m.ClusterID, defaultClusterID), "/") + "/master_view"
	e.MetricsPort = m.MetricsPort
	return e, e.Endpoints != nil
}

// Leader is host:port for HTTP of the leader that an election's value names.
func (e *Election) Leader(value string) (string, error) {
	m := Master{Address: value, MetricsPort: e.MetricsPort}
	host, err := m.host()
	if err != nil {
		return "", fmt.Errorf("the election names %.80q as leader, which is not HOST:PORT: %w", value, err)
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		return "", fmt.Errorf("the election names %s as leader, which is every host: "+
			"start the masters with --rpc_address or --rpc_interface", host)
	}
	return m.http(), nil
}

// Check says what is wrong with an address and a port; nil is nothing, and no address is nothing wrong.
func (m Master) Check() error {
	if m.MetricsPort < 0 || m.MetricsPort > 65535 {
		return fmt.Errorf("master_metrics_port %d is no port", m.MetricsPort)
	}
	scheme, _, has := strings.Cut(m.Address, "://")
	switch {
	case m.Address == "":
		return nil
	case !has:
		if _, err := m.host(); err != nil {
			return fmt.Errorf("master_server_address is not HOST:PORT: %w", err)
		}
		return nil
	case scheme != etcdScheme:
		return fmt.Errorf("master_server_address %.80q: the leader is found in etcd alone, not in %.20s; "+
			"give HOST:PORT of the leading master, or of a name that always leads to it", m.Address, scheme)
	}
	list := m.endpoints()
	if len(list) == 0 || len(list) > maxEndpoints {
		return fmt.Errorf("master_server_address %.80q has %d members of etcd: want 1 to %d, as %s://HOST:PORT;HOST:PORT",
			m.Address, len(list), maxEndpoints, etcdScheme)
	}
	if strings.ContainsAny(m.ClusterID, "\x00") || len(m.ClusterID) > 256 {
		return fmt.Errorf("master_cluster_id %.40q is no name of a cluster", m.ClusterID)
	}
	for _, endpoint := range list {
		if _, _, err := dial.SplitHostPort(endpoint); err != nil {
			return fmt.Errorf("master_server_address: a member of etcd is not HOST:PORT: %w", err)
		}
	}
	return nil
}

// Of reports whether the master is that of a configuration.
func (m Master) Of(c *Config) bool { return m.Address != "" && m.where() == c.Where() }

// master is the master of a configuration's store; nil if it has none.
func (c *Config) master() *Master {
	switch {
	case c.SGLang != nil && c.SGLang.Backend == mooncakeBackend:
		return &c.SGLang.Master
	case c.VLLM != nil:
		return &c.VLLM.Master
	}
	return nil
}

// CheckMaster says what is wrong with the address of the store's master; nil is nothing.
func (c *Config) CheckMaster() error {
	if m := c.master(); m != nil {
		return m.Check()
	}
	return nil
}

// MasterHosts are the hosts that a configuration names and that are dialled: of the master, or of etcd's members.
// [Config.CheckMaster] must have passed.
func (c *Config) MasterHosts() (hosts []string) {
	m := c.master()
	if m == nil || m.Address == "" {
		return nil
	}
	if list := m.endpoints(); list != nil {
		for _, endpoint := range list {
			host, _, _ := dial.SplitHostPort(endpoint) // it was checked
			hosts = append(hosts, host)
		}
		return hosts
	}
	host, _ := m.host() // it was checked
	return []string{host}
}

// Election is where the store's masters write down who leads; false if the configuration names one master, or none.
func (c *Config) Election() (e Election, elected bool) {
	if m := c.master(); m != nil {
		return m.election()
	}
	return Election{}, false
}

// WithMaster is the configuration with a master's address, unless it has one or needs none.
func (c Config) WithMaster(m Master) Config {
	if has := c.master(); has == nil || has.Address != "" || m.Address == "" {
		return c
	}
	switch {
	case c.SGLang != nil:
		s := *c.SGLang
		s.Master = m
		c.SGLang = &s
	case c.VLLM != nil:
		v := *c.VLLM
		v.Master = m
		c.VLLM = &v
	}
	return c
}

// Unasked says why the store cannot be asked, though the configuration makes sense; "" if it can be.
func (c *Config) Unasked() string {
	if s := c.SGLang; s != nil && s.TenantID != "" && s.TenantID != defaultTenant {
		return fmt.Sprintf("tenant_id is %.60q: a Mooncake master's HTTP answers for the tenant %s alone, so nothing of the "+
			"store is counted", s.TenantID, defaultTenant)
	}
	return ""
}

package hicache

import (
	"cmp"
	"fmt"
	"net"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/dial"
)

// Master is the address of a Mooncake master.
type Master struct {
	// Address is HOST:PORT of the RPC port, of which only the host matters here. With several masters, it is
	// etcd://HOST:PORT;HOST:PORT, and etcd has the elected leader.
	Address     string `json:"master_server_address,omitempty"`
	MetricsPort int    `json:"master_metrics_port,omitempty"` // HTTP port; 0 means 9003

	// ClusterID distinguishes the clusters in an etcd: MC_STORE_CLUSTER_ID of the engines and --cluster_id of the
	// masters. "" means Mooncake's default, mooncake_cluster.
	ClusterID string `json:"master_cluster_id,omitempty"`
}

// Election is the place in etcd where several masters record the leader
// (kvcache-ai/Mooncake › mooncake-store/src/ha/leadership/backends/etcd/etcd_leader_coordinator.cpp).
type Election struct {
	Endpoints   []string // http://HOST:PORT of etcd's members
	Key         string   // the value is HOST:PORT of the leader's RPC port
	MetricsPort int      // HTTP port of each master
}

const (
	etcdScheme       = "etcd"
	defaultClusterID = "mooncake_cluster"
	maxEndpoints     = 16 // endpoints of etcd
)

// host returns the host of an address. The address is HOST:PORT or HOST; brackets around an IPv6 address are optional.
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

// http returns the master's host:port for HTTP, or "" without an address or with an election.
func (m Master) http() string {
	host, err := m.host()
	if m.Address == "" || err != nil {
		return ""
	}
	return net.JoinHostPort(host, fmt.Sprint(cmp.Or(m.MetricsPort, defaultMetricsPort)))
}

// endpoints returns HOST:PORT of etcd's members, or nil for another form of address.
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

// where returns host:port of the master's HTTP port, or the etcd and the cluster's name of the election, or "" without
// an address.
func (m Master) where() string {
	list := m.endpoints()
	if list == nil {
		return m.http()
	}
	return etcdScheme + "://" + strings.Join(list, ";") + " " + cmp.Or(m.ClusterID, defaultClusterID)
}

// election returns the election of the masters, or false for the address of a single master.
func (m Master) election() (e Election, elected bool) {
	for _, endpoint := range m.endpoints() {
		e.Endpoints = append(e.Endpoints, "http://"+endpoint)
	}
	e.Key = "mooncake-store/" + strings.TrimSuffix(cmp.Or(m.ClusterID, defaultClusterID), "/") + "/master_view"
	e.MetricsPort = m.MetricsPort
	return e, e.Endpoints != nil
}

// Leader returns host:port for HTTP of the leader. value is the value of the election.
func (e *Election) Leader(value string) (string, error) {
	m := Master{Address: value, MetricsPort: e.MetricsPort}
	host, err := m.host()
	if err != nil {
		return "", fmt.Errorf("the leader in the election is %.80q, not HOST:PORT: %w", value, err)
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		return "", fmt.Errorf("the leader in the election is %s, which means every host: "+
			"start the masters with --rpc_address or --rpc_interface", host)
	}
	return m.http(), nil
}

// Check returns an error if the address or the port is invalid. A missing address is valid.
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

// Of reports whether a configuration has this master.
func (m Master) Of(c *Config) bool { return m.Address != "" && m.where() == c.Where() }

// master returns the master of a configuration's store, or nil.
func (c *Config) master() *Master {
	switch {
	case c.SGLang != nil && c.SGLang.Backend == mooncakeBackend:
		return &c.SGLang.Master
	case c.VLLM != nil:
		return &c.VLLM.Master
	}
	return nil
}

// CheckMaster returns an error if the address of the store's master is invalid.
func (c *Config) CheckMaster() error {
	if m := c.master(); m != nil {
		return m.Check()
	}
	return nil
}

// MasterHosts returns the hosts that a configuration names and kvatlas dials: the master, or etcd's members.
// [Config.CheckMaster] must have passed.
func (c *Config) MasterHosts() (hosts []string) {
	m := c.master()
	if m == nil || m.Address == "" {
		return nil
	}
	if list := m.endpoints(); list != nil {
		for _, endpoint := range list {
			host, _, _ := dial.SplitHostPort(endpoint) // checked before
			hosts = append(hosts, host)
		}
		return hosts
	}
	host, _ := m.host() // checked before
	return []string{host}
}

// Election returns the election of the store's masters, or false for a single master or none.
func (c *Config) Election() (e Election, elected bool) {
	if m := c.master(); m != nil {
		return m.election()
	}
	return Election{}, false
}

// WithMaster returns the configuration with the master m, unless it has a master or needs none.
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

// Unasked returns the reason why a valid store cannot be queried, or "".
func (c *Config) Unasked() string {
	if s := c.SGLang; s != nil && s.TenantID != "" && s.TenantID != defaultTenant {
		return fmt.Sprintf("tenant_id is %.60q: a Mooncake master's HTTP port serves only the tenant %s, so no page of the "+
			"store is counted", s.TenantID, defaultTenant)
	}
	return ""
}

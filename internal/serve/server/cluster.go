package server

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/datafolder"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/index/scatter"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Parameters of the nodes' membership.
const (
	memberBeat      = time.Second
	memberDeadAfter = 5 * time.Second
	// age at which an unchanged record is deleted; only for cleaning
	memberRecord = 10 * time.Minute
)

// clusterConfig returns the configuration of this node's membership in the cluster. The node's name is unique in the
// namespace.
func (s *Server) clusterConfig(ctx context.Context) (cluster.MemberConfig, error) {
	bucket, err := s.ns.EnsureNodes(ctx, memberRecord)
	if err != nil {
		return cluster.MemberConfig{}, err
	}
	session, dead := rand.Text(), func(string) bool { return false }
	if s.Embedded != nil {
		if session, dead, err = sessionIn(s.Data); err != nil {
			return cluster.MemberConfig{}, err
		}
	}
	return cluster.MemberConfig{
		Config: cluster.Config{
			Node: s.ID, Session: session, Build: s.Version, Zone: s.Zone, Partitions: s.ns.Partitions(),
			Replication: s.Replication, Heartbeat: memberBeat, DeadAfter: memberDeadAfter, Host: s.Embedded != nil,
			Finishes: !s.NoForwarding,
		},
		Dead: dead, Namespace: s.ns, Bucket: bucket,
		Drain: s.Drain * 3 / 4, // the rest is for what is under way, and for last snapshots
		Recreate: func(ctx context.Context) error {
			_, err := s.ns.EnsureNodes(ctx, memberRecord)
			return err
		},
		Log: s.log,
	}, nil
}

// lifeFile is the file with the name of a data folder.
const lifeFile = "kvatlas.life"

// sessionIn returns the name of the session of a process that holds the lock of a data folder. dead reports whether a
// session belongs to an earlier process with the lock. Such processes have ended, because the lock was free.
func sessionIn(dir string) (session string, dead func(session string) bool, err error) {
	f, err := datafolder.Open(dir, lifeFile)
	if err != nil {
		return "", nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(f)
	if err != nil {
		return "", nil, fmt.Errorf("data folder: %w", err)
	}
	folder := strings.TrimSpace(string(text))
	if folder == "" {
		folder = rand.Text()
		// with a full disk, the next process waits until this process's record is stale
		_, _ = f.WriteAt([]byte(folder+"\n"), 0)
	}
	session = folder + "." + rand.Text()
	return session, func(other string) bool { return other != session && strings.HasPrefix(other, folder+".") }, nil
}

// view returns the possible nodes of every partition, or nil without other nodes.
func (s *Server) view() scatter.View {
	v := s.views.Now()
	if s.Embedded != nil && len(v.Peers) == 0 && v.GraceOver {
		return nil
	}
	return candidates{v, s}
}

// candidates selects the nodes for the query of a partition: the nodes that announce the partition. Without an
// announcement, the nodes that probably serve the partition soon.
type candidates struct {
	view *cluster.View
	s    *Server
}

func (c candidates) Fit(p events.Partition) int { return c.view.Fit(p) }

func (c candidates) Finishes(node string) bool { return c.view.Finishes(node) }

// MayServe reports whether a partition may have workers of a model, by the announcement of a node or by a registration.
func (c candidates) MayServe(p events.Partition, model string) bool {
	if c.view.MayServe(p, model) || c.s.node.MayServe(p, model) {
		return true
	}
	_, registered := slices.BinarySearch(c.s.registry.Partitions(model), p)
	return registered
}

// likelyServing is the number of queried nodes for a partition without an announcement.
const likelyServing = 3

func (c candidates) Serving(p events.Partition) []string {
	if known := c.view.Serving(p); len(known) > 0 {
		return known
	}
	all := c.view.Order(p)
	return all[:min(len(all), likelyServing)]
}

// nodes lists all live nodes, including this node.
func (s *Server) nodes() []string {
	names := []string{s.ID}
	for _, r := range s.views.Now().Peers {
		names = append(names, r.Node)
	}
	slices.Sort(names)
	return names
}

// firstNode reports whether this node has the first name of all nodes, and so the work of a single node.
func (s *Server) firstNode() bool { return s.nodes()[0] == s.ID }

// peers is the transport of a scatter, which sends requests to nodes by name.
type peers struct {
	*rpc.Pool
	namespace string
}

// Send sends a request to a node. See [rpc.Pool.Send].
func (p *peers) Send(
	node, op string, patience time.Duration, trace string, body []byte, to rpc.Receiver, tag int,
) (id uint64, err error) {
	subject, err := jetstream.Names(p.namespace).Node(node, op)
	if err != nil {
		return 0, api.Errorf(api.CodeInternal, "%v", err)
	}
	return p.Pool.Send(subject, api.MsgPack, patience, trace, body, to, tag)
}

// peer returns a client of another node, which answers from its own partitions.
func (s *Server) peer(name string) (*client.Client, error) {
	if _, err := jetstream.Names(s.Namespace).Node(name, ""); err != nil {
		return nil, fmt.Errorf("node %.64q: %w", name, err)
	}
	subject := func(op string) string {
		subject, _ := jetstream.Names(s.Namespace).Node(name, op) // the name was checked above
		return subject
	}
	absent := fmt.Sprintf("node %q of namespace %q does not answer on this NATS server: it is not running",
		name, s.Namespace)
	return client.OverPool(s.pool, subject, absent, client.Options{}), nil
}

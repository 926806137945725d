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
	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/index/scatter"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/rpc"
)

// How nodes of a cluster hear of each other.
const (
	memberBeat      = time.Second
	memberDeadAfter = 5 * time.Second
	// a record that is not renewed for so long goes; that tidies up, and decides nothing
	memberRecord = 10 * time.Minute
)

// clusterConfig is how this node is a member of its namespace's cluster, under its name, which no other may have.
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

// lifeFile is where a data folder has its name.
const lifeFile = "kvatlas.life"

// sessionIn returns a name for the session of a process that has the lock of a data folder, and what knows the
// sessions of processes that had it before: they have ended, since the lock was free.
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
		// if the disk is full, the next process waits until this one's record is seen to stand still
		_, _ = f.WriteAt([]byte(folder+"\n"), 0)
	}
	session = folder + "." + rand.Text()
	return session, func(other string) bool { return other != session && strings.HasPrefix(other, folder+".") }, nil
}

// view is whom a partition can be asked of; nil if nobody else can be asked.
func (s *Server) view() scatter.View {
	v := s.views.Now()
	if s.Embedded != nil && len(v.Peers) == 0 && v.GraceOver {
		return nil
	}
	return candidates{v, s}
}

// candidates is whom a partition can be asked of: the nodes that are known to serve it, or, while none is, those that
// will probably serve it but have not announced it yet.
type candidates struct {
	view *cluster.View
	s    *Server
}

func (c candidates) Fit(p events.Partition) int { return c.view.Fit(p) }

func (c candidates) Finishes(node string) bool { return c.view.Finishes(node) }

// MayServe reports whether a partition may have workers of a model: this node or another says so, or one is registered.
func (c candidates) MayServe(p events.Partition, model string) bool {
	if c.view.MayServe(p, model) || c.s.node.MayServe(p, model) {
		return true
	}
	_, registered := slices.BinarySearch(c.s.registry.Partitions(model), p)
	return registered
}

// likelyServing is how many nodes are asked for a partition that nobody is known to serve.
const likelyServing = 3

func (c candidates) Serving(p events.Partition) []string {
	if known := c.view.Serving(p); len(known) > 0 {
		return known
	}
	all := c.view.Order(p)
	return all[:min(len(all), likelyServing)]
}

// nodes lists all nodes that live, this one too.
func (s *Server) nodes() []string {
	names := []string{s.ID}
	for _, r := range s.views.Now().Peers {
		names = append(names, r.Node)
	}
	slices.Sort(names)
	return names
}

// peers is a scatter's transport: it carries requests to nodes by their names.
type peers struct {
	*rpc.Pool
	namespace string
}

// Send sends a request to a node. See [rpc.Pool.Send].
func (p *peers) Send(
	node, op string, patience time.Duration, trace string, body []byte, to rpc.Receiver, tag int,
) (id uint64, err error) {
	subject, err := jetstream.NodeSubject(p.namespace, node, op)
	if err != nil {
		return 0, api.Errorf(api.CodeInternal, "%v", err)
	}
	return p.Pool.Send(subject, api.MsgPack, patience, trace, body, to, tag)
}

// peer returns a client of another node, which answers for what it holds itself.
func (s *Server) peer(name string) (*client.Client, error) {
	if _, err := jetstream.NodeSubject(s.Namespace, name, ""); err != nil {
		return nil, fmt.Errorf("node %.64q: %w", name, err)
	}
	subject := func(op string) string {
		subject, _ := jetstream.NodeSubject(s.Namespace, name, op) // its name was found to be good
		return subject
	}
	absent := fmt.Sprintf("node %q of namespace %q does not answer on this NATS server: it is not running",
		name, s.Namespace)
	return client.OverPool(s.pool, subject, absent, client.Options{}), nil
}

package wire

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Everywhere is an indexer of a cluster that has all nodes do what each can do for itself alone: it compares what all
// of them hold, and has each write the snapshots that are its own to write. For the rest it is the indexer that it is
// made of.
type Everywhere struct {
	api.Indexer // this node alone

	Whole interface { // all nodes together
		Find(ctx context.Context, q *api.Query) (*api.Answer, error)
		Workers(ctx context.Context, asked api.WorkersRequest) (*api.WorkerList, error)
	}
	Self       string
	Nodes      func() []string // all that are there, this one too
	Partitions uint32
	Others     *Nodes
}

// Find asks all nodes.
func (e *Everywhere) Find(ctx context.Context, q *api.Query) (*api.Answer, error) {
	return e.Whole.Find(ctx, q)
}

// Workers asks all nodes.
func (e *Everywhere) Workers(ctx context.Context, asked api.WorkersRequest) (*api.WorkerList, error) {
	return e.Whole.Workers(ctx, asked)
}

// alone is what a node does for itself alone: an [api.Indexer], or an [client.Client] of another node.
type alone interface {
	Verify(ctx context.Context, at []api.PartitionSeq) (*api.Status, error)
	Snapshot(ctx context.Context) (*api.SnapshotList, error)
}

func (e *Everywhere) node(name string) (alone, error) {
	if name == e.Self {
		return e.Indexer, nil
	}
	return e.Others.Client(name)
}

// statusPatience is how long another node may take to say how it is.
const statusPatience = 3 * time.Second

// StatusOf asks the node for its status. It waits for half of the time that is left at most, so that whoever asks hears
// that the node does not answer.
func (e *Everywhere) StatusOf(ctx context.Context, node string) (*api.Status, error) {
	if node == e.Self {
		return e.Indexer.Status(ctx)
	}
	patience := statusPatience
	if deadline, ok := ctx.Deadline(); ok {
		patience = min(patience, time.Until(deadline)/2)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c, err := e.Others.Client(node)
	if err != nil {
		return nil, api.Errorf(api.CodeMalformed, "%v", err)
	}
	s, err := c.Status(ctx)
	if err != nil {
		return nil, api.Errorf(api.CodeUnavailable, "node %s does not answer: %s", node, api.AsError(err).Message)
	}
	return s, nil
}

// Verify is this node's status, with the checksums of all nodes if there are others. An error of another node names it.
func (e *Everywhere) Verify(ctx context.Context, at []api.PartitionSeq) (*api.Status, error) {
	s, err := e.Indexer.Verify(ctx, at)
	nodes := e.Nodes()
	if err != nil || len(nodes) < 2 {
		return s, err
	}
	s.Replicas, err = verifyReplicas(ctx, nodes, func(ctx context.Context, name string,
		at []api.PartitionSeq) (*api.Status, error) {
		n, err := e.node(name)
		if err != nil {
			return nil, err
		}
		return n.Verify(ctx, at)
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// Nodes learn with a beat who is to write what; those that are asked in between may leave a partition to each other.
const (
	snapshotRounds = 3
	snapshotPause  = time.Second
)

// Snapshot has every partition's snapshot written, each by the node whose it is to write. An error of another node
// names it.
func (e *Everywhere) Snapshot(ctx context.Context) (*api.SnapshotList, error) {
	written := map[events.Partition]api.SnapshotInfo{}
	for round := range snapshotRounds {
		if round > 0 {
			select {
			case <-time.After(snapshotPause):
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		if err := e.snapshot(ctx, written); err != nil {
			return nil, err
		}
		if len(written) == int(e.Partitions) {
			break
		}
	}
	list := &api.SnapshotList{Snapshots: []api.SnapshotInfo{}}
	for p := range events.Partition(e.Partitions) {
		if s, ok := written[p]; ok {
			list.Snapshots = append(list.Snapshots, s)
		} else {
			list.Missing = append(list.Missing, p)
		}
	}
	return list, nil
}

// snapshot has all nodes write what is theirs to write, and adds what they wrote.
func (e *Everywhere) snapshot(ctx context.Context, written map[events.Partition]api.SnapshotInfo) error {
	nodes := e.Nodes()
	lists, failed := make([]*api.SnapshotList, len(nodes)), make([]error, len(nodes))
	var all sync.WaitGroup
	for i, name := range nodes {
		all.Go(func() {
			n, err := e.node(name)
			if err == nil {
				lists[i], err = n.Snapshot(ctx)
			}
			failed[i] = err
		})
	}
	all.Wait()
	for i, list := range lists {
		if failed[i] != nil {
			return ofNode(nodes[i], "", failed[i])
		}
		for _, s := range list.Snapshots {
			if s.Generation >= written[s.Partition].Generation { // two may have thought that it is theirs
				written[s.Partition] = s
			}
		}
	}
	return nil
}

// ofNode is an error of a node, which it names.
func ofNode(name, what string, err error) error {
	e := api.AsError(err)
	return api.Errorf(e.Code, "node %s%s: %s", name, what, e.Message)
}

// verifyRounds is how often the replicas of a partition are asked until they answer for one place. Each round names a
// place further ahead of where they are, so that one of them is beyond what the log grows by while the requests travel.
const verifyRounds = 6

// verifyReplicas compares what the nodes of a cluster hold. ask asks one node; at is where it is to reckon checksums.
func verifyReplicas(ctx context.Context, nodes []string, ask func(ctx context.Context, node string,
	at []api.PartitionSeq) (*api.Status, error)) ([]api.PartitionReplicas, error) {
	var done []api.PartitionReplicas
	open := map[events.Partition]bool{} // of those seen, which are not done
	var at []api.PartitionSeq
	for round := range verifyRounds {
		answers, failed := make([]*api.Status, len(nodes)), make([]error, len(nodes))
		var all sync.WaitGroup
		for i, node := range nodes {
			all.Go(func() { answers[i], failed[i] = ask(ctx, node, at) })
		}
		all.Wait()
		found := map[events.Partition]*api.PartitionReplicas{}
		last := map[events.Partition]events.StreamSeq{}
		for i, s := range answers {
			if failed[i] != nil {
				return nil, ofNode(nodes[i], " cannot be compared", failed[i])
			}
			for _, p := range s.Partitions {
				if !open[p.Partition] && round > 0 || !p.State.Serves() {
					continue
				}
				r := found[p.Partition]
				if r == nil {
					r = &api.PartitionReplicas{Partition: p.Partition, Equal: true}
					found[p.Partition] = r
				}
				r.Replicas = append(r.Replicas, api.ReplicaSum{Node: nodes[i], Seq: p.Seq, Checksum: p.Checksum})
				last[p.Partition] = max(last[p.Partition], p.Seq, p.LogLast)
			}
		}
		at = at[:0]
		clear(open)
		for p, r := range found {
			same := true
			for _, x := range r.Replicas {
				same = same && x.Seq == r.Replicas[0].Seq
				r.Equal = r.Equal && x == api.ReplicaSum{Node: x.Node, Seq: r.Replicas[0].Seq,
					Checksum: r.Replicas[0].Checksum}
			}
			if same || round == verifyRounds-1 {
				done = append(done, *r)
				continue
			}
			open[p] = true
			at = append(at, api.PartitionSeq{Partition: p, Seq: last[p] + 64<<(2*round)})
		}
		if len(open) == 0 {
			break
		}
	}
	slices.SortFunc(done, func(a, b api.PartitionReplicas) int { return cmp.Compare(a.Partition, b.Partition) })
	return done, nil
}

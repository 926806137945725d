package cluster

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/client"
)

// failover kills a node during the queries of four clients, and waits until every partition has two replicas again.
func (b *bed) failover(client *client.Client, nodes []*process) error {
	lost := 0 // replicas
	before, err := client.Status(b.ctx)
	if err != nil {
		return err
	}
	for _, n := range before.Cluster.Nodes {
		if n.Node == b.names[2] { // nodes[2]
			for _, p := range n.Ready {
				if _, has := b.filled[p]; has { // other partitions have no snapshot to restore
					lost++
				}
			}
		}
	}
	var mu sync.Mutex
	var killed time.Time
	var lastBad, longest time.Duration
	count, bad := 0, 0
	asking, stop := context.WithCancel(b.ctx)
	defer stop()
	var clients sync.WaitGroup
	for c := range 4 {
		clients.Go(func() {
			for i := c; asking.Err() == nil; i++ {
				within, cancel := context.WithTimeout(b.ctx, time.Second)
				begun := time.Now()
				a, err := client.Find(within, b.question(i))
				took := time.Since(begun)
				cancel()
				whole := err == nil && a.Complete && len(a.Workers) == b.o.Workers
				mu.Lock()
				if !killed.IsZero() {
					if count++; !whole {
						bad++
						lastBad = max(lastBad, begun.Sub(killed))
					} else {
						longest = max(longest, took)
					}
				}
				mu.Unlock()
				time.Sleep(time.Millisecond)
			}
		})
	}
	time.Sleep(500 * time.Millisecond)
	mu.Lock()
	killed = time.Now()
	nodes[2].kill()
	mu.Unlock()
	left := b.settled(client, 2, 2)
	redundant := time.Since(killed)
	stop()
	clients.Wait()
	if left != nil {
		return left
	}
	r := &b.report
	r.FailQueries, r.NotWhole, r.WholeAgain, r.FailLongest, r.Redundant = count, bad, lastBad.Seconds(),
		longest.Seconds(), redundant.Seconds()
	var began time.Time
	for begun := time.Now(); ; time.Sleep(10 * time.Millisecond) { // polls the log lines of the nodes
		lines := 0
		if r.Rereplicated, began, lines, err = restored(killed, nodes[:2]...); err != nil {
			return err
		}
		if lines > 0 && lines >= lost {
			break
		}
		if time.Since(begun) > patience {
			return fmt.Errorf("the nodes' logs have %d lines about restored partitions, want %d", lines, lost)
		}
	}
	r.Believed = began.Sub(killed).Seconds()
	return nil
}

package upkeep

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Deletion lists the streams and buckets of a namespace, in the form of the JSON output.
type Deletion struct {
	Namespace string                `json:"namespace"`
	Deleted   bool                  `json:"deleted"`
	Streams   []jetstream.StreamUse `json:"streams"`
}

// DeleteNamespace lists the streams and buckets of a namespace, and deletes them if yes is true. Without force, an
// indexer or a shim that answers is an error, and nothing changes. timeout limits the wait for an indexer.
func DeleteNamespace(ctx context.Context, conn *jetstream.Conn, namespace string, yes, force bool,
	timeout time.Duration) (*Deletion, error) {
	d, err := listNamespace(ctx, conn, namespace)
	if err != nil || !yes {
		return d, err
	}
	if !force {
		if err := inUse(ctx, conn, namespace, timeout); err != nil {
			return nil, err
		}
	}
	return d, d.delete(ctx, conn)
}

// listNamespace lists the streams and buckets of a namespace. A namespace without any is an error.
func listNamespace(ctx context.Context, conn *jetstream.Conn, namespace string) (*Deletion, error) {
	d := &Deletion{Namespace: namespace}
	var err error
	if d.Streams, err = conn.NamespaceStreams(ctx, namespace); err != nil {
		return nil, err
	}
	if len(d.Streams) == 0 {
		return nil, fmt.Errorf("namespace %q has no stream or bucket on this NATS server: the namespace was deleted, or "+
			"--namespace or --nats names another", namespace)
	}
	return d, nil
}

// delete deletes the listed streams and buckets. The namespace's record is the last of them, so an interrupted deletion
// can be repeated.
func (d *Deletion) delete(ctx context.Context, conn *jetstream.Conn) error {
	for _, s := range d.Streams {
		if err := conn.DeleteStream(ctx, s.Name); err != nil {
			return err
		}
	}
	d.Deleted = true
	return nil
}

// inUse returns an error if an indexer or a shim of the namespace answers. timeout limits the wait for an indexer.
func inUse(ctx context.Context, conn *jetstream.Conn, namespace string, timeout time.Duration) error {
	c, err := client.NATS(conn.NATS(), namespace, client.Options{Absent: time.Millisecond})
	if err != nil {
		return err
	}
	defer c.Close()
	waiting, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if s, err := c.Status(waiting); err == nil {
		return fmt.Errorf("indexer %s serves namespace %q; stop all indexers and shims first, or give --force", s.Node,
			namespace)
	}
	ns, err := jetstream.OpenNamespace(ctx, conn, namespace)
	if err != nil {
		return nil // no shim runs without a record
	}
	shims := make([]error, ns.Partitions())
	var all sync.WaitGroup
	for p := range shims {
		all.Go(func() {
			list, err := control.ShimsOf(ctx, ns, events.Partition(p))
			noun := "shims"
			if len(list) == 1 {
				noun = "shim"
			}
			if shims[p] = err; len(list) > 0 {
				shims[p] = fmt.Errorf("%d %s run in partition %d, the first for %s; stop the shims, or give --force", len(list),
					noun, p, list[0].Key())
			}
		})
	}
	all.Wait()
	return errors.Join(shims...)
}

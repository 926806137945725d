package dump

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/kvatlas/kvatlas/internal/index/node"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

// Dumped is the result of the dump of one partition.
type Dumped struct {
	Partition events.Partition
	Known     bool             // the partition has a usable snapshot
	Seq       events.StreamSeq // position of the snapshot in the log
	Ranks     int
	Events    uint64
	Pending   int // blocks without a known parent, left out of the dump
}

// Write dumps all workers, or one, from the newest usable snapshots in the bucket. It reports every partition to
// tell, and calls out.Write once per line. The memory is bounded by one partition's [Image].
func Write(ctx context.Context, ns *jetstream.Namespace, worker events.WorkerID, out io.Writer,
	tell func(Dumped)) error {
	every := func(events.WorkerID, string) bool { return true }
	if worker != "" {
		return write(ctx, ns, []events.WorkerID{worker}, every, false, out, tell)
	}
	return write(ctx, ns, nil, every, true, out, tell)
}

// Print is Write to a buffered writer, with a line for each partition to progress. It returns an error if no snapshot
// has the worker.
func Print(ctx context.Context, ns *jetstream.Namespace, worker events.WorkerID, to, progress io.Writer) error {
	out := bufio.NewWriterSize(to, 1<<16)
	ranks, missing := 0, 0
	err := Write(ctx, ns, worker, out, func(d Dumped) {
		if !d.Known {
			missing++
			return
		}
		ranks += d.Ranks
		fmt.Fprintf(progress, "partition %d: %d events of %d ranks, as of %d in the log", d.Partition, d.Events, d.Ranks,
			d.Seq)
		if d.Pending > 0 {
			fmt.Fprintf(progress, "; left out: %d blocks with missing parents", d.Pending)
		}
		fmt.Fprintln(progress)
	})
	if missing > 0 {
		fmt.Fprintf(progress, "partitions without a snapshot: %d\n", missing)
	}
	if err = errors.Join(err, out.Flush()); err == nil && worker != "" && ranks == 0 {
		err = fmt.Errorf("no snapshot has the worker %q", worker)
	}
	return err
}

// WriteWorkers is Write for the ranks of the given workers, restricted to models for which claimed returns true.
func WriteWorkers(ctx context.Context, ns *jetstream.Namespace, workers []events.WorkerID,
	claimed func(instance events.WorkerID, model string) bool, out io.Writer) error {
	return write(ctx, ns, workers, claimed, false, out, func(Dumped) {})
}

func write(ctx context.Context, ns *jetstream.Namespace, workers []events.WorkerID,
	claimed func(events.WorkerID, string) bool, all bool, out io.Writer, tell func(Dumped)) error {
	wanted := make([]map[events.WorkerID]bool, ns.Partitions())
	for _, worker := range workers {
		p, err := ns.PartitionOf(worker)
		if err != nil {
			return err
		}
		if wanted[p] == nil {
			wanted[p] = map[events.WorkerID]bool{}
		}
		wanted[p][worker] = true
	}
	for p, of := range wanted {
		if of == nil && !all {
			continue
		}
		p := events.Partition(p)
		var image *Image
		var ranks []snapshot.RankState
		manifest, err := node.ReadSnapshot(ctx, ns, p,
			func(_ *snapshot.Manifest, states []snapshot.RankState) (snapshot.Sink, error) {
				image, ranks = NewImage(), states
				return image, nil
			})
		if err != nil {
			return fmt.Errorf("partition %d: %w", p, err)
		}
		d := Dumped{Partition: p}
		if manifest != nil {
			d.Known, d.Seq = true, manifest.Seq
			for i := range ranks {
				instance := events.WorkerID(ranks[i].Instance)
				if (all || of[instance]) && claimed(instance, string(ranks[i].Model)) {
					if err := d.rank(image, i, &ranks[i], out); err != nil {
						return err
					}
				}
			}
		}
		tell(d)
	}
	return nil
}

// rank writes one rank's lines.
func (d *Dumped) rank(image *Image, i int, state *snapshot.RankState, out io.Writer) error {
	d.Ranks++
	var line []byte
	var id events.EventID
	pending, err := image.Events(i, func(e *events.Event, groups ...events.Event) error {
		id++
		if len(e.Locals) > 0 {
			e.Lookahead = state.Lookahead
		}
		line = events.AppendRouterEvent(line[:0], state.Key(), id, e, groups...)
		_, err := out.Write(line)
		return err
	})
	d.Events += uint64(id)
	d.Pending += pending
	return err
}

package main

import (
	"fmt"
	"io"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// differing is the error of replicas that are not equal; nil if all are.
func differing(list []api.PartitionReplicas) error {
	var bad []events.Partition
	for i := range list {
		if !list[i].Equal {
			bad = append(bad, list[i].Partition)
		}
	}
	if len(bad) == 0 {
		return nil
	}
	return fmt.Errorf("replicas of partitions %s are not equal, or did not come to one place in the log", ranges(bad))
}

func printReplicas(w io.Writer, list []api.PartitionReplicas) {
	var rows [][]any
	for i := range list {
		for _, r := range list[i].Replicas {
			verdict := "equal"
			switch first := list[i].Replicas[0]; {
			case len(list[i].Replicas) == 1:
				verdict = "the only one"
			case list[i].Equal:
			case r.Seq != first.Seq:
				verdict = "AT ANOTHER PLACE"
			case r.Checksum != first.Checksum:
				verdict = "DIFFERS"
			default:
				verdict = "others differ"
			}
			rows = append(rows, []any{list[i].Partition, r.Node, r.Seq, r.Checksum, verdict})
		}
	}
	cli.Fprintln(w)
	cli.Table(w, []string{"PARTITION", "NODE", "SEQ", "CHECKSUM", ""}, rows)
}

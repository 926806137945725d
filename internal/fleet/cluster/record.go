package cluster

import (
	"cmp"
	"maps"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// RecordVersion is the version of records that this build writes, and the only one that it reads. Nodes of another
// version are ignored: the nodes of each version own every partition among themselves.
const RecordVersion = 1

// Record is what a node announces. It is kept as JSON.
type Record struct {
	Version     int    `json:"version"`
	Node        string `json:"node"`
	Session     string `json:"life"` // of this process; no other process has it
	Build       string `json:"build,omitempty"`
	Zone        string `json:"zone,omitempty"`
	Placement   int    `json:"placement,omitempty"` // the latest version of the placement rule that the node knows
	Heartbeat   uint64 `json:"beat"`                // grows with each write
	Partitions  uint32 `json:"partitions"`
	Replication int    `json:"replication"` // asked for; 0: the default
	Leaving     bool   `json:"leaving,omitempty"`
	Releasing   Set    `json:"releasing,omitempty"` // still serves them, and is about to release them
	Finishes    bool   `json:"finishes,omitempty"`  // answers queries that other nodes forward (package scatter)
	Advertisement
}

// Advertisement is what a node serves.
type Advertisement struct {
	Ready  Set `json:"ready"`            // restored, caught up, and not far behind the log
	Behind Set `json:"behind,omitempty"` // restored, and far behind: asked only if no other node can be

	// Failing are those whose snapshots this node has tried to write and could not: another that is ready should.
	Failing Set `json:"failing,omitempty"`

	// Models says for each model in which of these partitions it has workers. Partitions in Unlisted may have workers
	// of others too.
	Models   map[string]Set `json:"models,omitempty"`
	Unlisted Set            `json:"unlisted,omitempty"`
}

// maxModelBytes bounds what a record says of models.
const maxModelBytes = 4096

// SetModels says which partitions have workers of which models, as far as that fits into a record. Models of few
// partitions are left out first; their partitions are then Unlisted, and are asked whatever the model.
func (s *Advertisement) SetModels(models map[string]Set) {
	s.Models, s.Unlisted = map[string]Set{}, nil
	names := slices.SortedFunc(maps.Keys(models), func(a, b string) int {
		return cmp.Or(cmp.Compare(models[b].Len(), models[a].Len()), cmp.Compare(a, b))
	})
	size := 0
	for _, name := range names {
		if size += len(name) + len(models[name].String()); size > maxModelBytes {
			for _, p := range models[name].List() {
				s.Unlisted.Add(p)
			}
			continue
		}
		s.Models[name] = models[name]
	}
}

// serves reports whether the node can be asked about a partition.
func (s *Advertisement) serves(p events.Partition) bool { return s.Ready.Has(p) || s.Behind.Has(p) }

// mayServe reports whether a partition that the node serves may have workers of a model.
func (s *Advertisement) mayServe(p events.Partition, model string) bool {
	return s.Models[model].Has(p) || s.Unlisted.Has(p)
}

// counts reports whether a node is ready to serve a partition, and is not releasing it.
func (r *Record) counts(p events.Partition) bool { return r.Ready.Has(p) && !r.Releasing.Has(p) }

// Seen is a record as it was found in the bucket.
type Seen struct {
	Record
	Revision uint64 `json:"revision"`
}

// Look is one look at all records.
type Look struct {
	Records    []Seen
	Unreadable []string // keys of other entries: nobody's records

	// After is the heartbeat of this node's own record that had been acknowledged before the look began, if each record
	// came from the bucket's leader; else 0.
	After uint64
}

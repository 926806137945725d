package cluster

import (
	"cmp"
	"maps"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// RecordVersion is the version of records that this build reads and writes. Nodes ignore other versions: the nodes of
// each version own every partition among themselves.
const RecordVersion = 1

// Record is the announcement of a node, in JSON.
type Record struct {
	Version     int    `json:"version"`
	Node        string `json:"node"`
	Session     string `json:"life"` // unique for each process
	Build       string `json:"build,omitempty"`
	Zone        string `json:"zone,omitempty"`
	Placement   int    `json:"placement,omitempty"` // the latest version of the placement rule that the node supports
	Heartbeat   uint64 `json:"beat"`                // grows with each write
	Partitions  uint32 `json:"partitions"`
	Replication int    `json:"replication"` // requested; 0: the default
	Leaving     bool   `json:"leaving,omitempty"`
	Releasing   Set    `json:"releasing,omitempty"` // still served, and about to be released
	Finishes    bool   `json:"finishes,omitempty"`  // answers queries that other nodes forward (package scatter)
	Advertisement
}

// Advertisement is the service of a node.
type Advertisement struct {
	Ready  Set `json:"ready"`            // restored, caught up, and not far behind the log
	Behind Set `json:"behind,omitempty"` // restored, and far behind: used only without another node

	// Failing has partitions without a snapshot after failed writes by this node: another ready node should write.
	Failing Set `json:"failing,omitempty"`

	// Models has, for each model, the partitions with workers of the model. Partitions in Unlisted may also have
	// workers of other models.
	Models   map[string]Set `json:"models,omitempty"`
	Unlisted Set            `json:"unlisted,omitempty"`
}

// maxModelBytes limits the size of the models in a record.
const maxModelBytes = 4096

// SetModels sets the partitions of each model, as far as they fit into a record. Models with few partitions are omitted
// first. Their partitions are then Unlisted, and receive queries for any model.
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

// serves reports whether the node accepts queries for a partition.
func (s *Advertisement) serves(p events.Partition) bool { return s.Ready.Has(p) || s.Behind.Has(p) }

// mayServe reports whether a served partition may have workers of a model.
func (s *Advertisement) mayServe(p events.Partition, model string) bool {
	return s.Models[model].Has(p) || s.Unlisted.Has(p)
}

// counts reports whether a node is ready to serve a partition and is not releasing it.
func (r *Record) counts(p events.Partition) bool { return r.Ready.Has(p) && !r.Releasing.Has(p) }

// Seen is a record from the bucket.
type Seen struct {
	Record
	Revision uint64 `json:"revision"`
}

// Look is the result of a read of all records.
type Look struct {
	Records    []Seen
	Unreadable []string // keys of entries that no node wrote

	// After is the heartbeat of this node's own record that was acknowledged before the look began, if each record came
	// from the bucket's leader. Otherwise it is 0.
	After uint64
}

package cluster

import (
	"cmp"
	"maps"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// RecordVersion is the version of records that this build writes and the only one that it understands. Nodes of another
// version are left out: each side owns every partition among its own.
const RecordVersion = 1

// Record is what a node says of itself. It is kept as JSON.
type Record struct {
	Version     int    `json:"version"`
	Node        string `json:"node"`
	Life        string `json:"life"` // of this process; another under the same name has another
	Build       string `json:"build,omitempty"`
	Beat        uint64 `json:"beat"` // grows with each writing
	Partitions  uint32 `json:"partitions"`
	Replication int    `json:"replication"` // asked for; 0: as many as usual
	Leaving     bool   `json:"leaving,omitempty"`
	Releasing   Set    `json:"releasing,omitempty"` // serves them still, and is about to let them go
	Standing
}

// Standing is what a node serves.
type Standing struct {
	Ready  Set `json:"ready"`            // restored, caught up, and not far behind the log
	Behind Set `json:"behind,omitempty"` // restored, and far behind: for who has nobody else to ask

	// Failing are those whose snapshots this node has tried to write and could not: another that is ready should.
	Failing Set `json:"failing,omitempty"`

	// Models says for each model in which of these partitions it has workers. Partitions in Unlisted may have workers
	// of others too.
	Models   map[string]Set `json:"models,omitempty"`
	Unlisted Set            `json:"unlisted,omitempty"`
}

// maxModelBytes bounds what a record says of models.
const maxModelBytes = 4096

// SetModels says where which models have workers, as far as that fits into a record. Models of few partitions are left
// out first: each makes only its own partitions ones that must be asked whatever the model.
func (s *Standing) SetModels(models map[string]Set) {
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

// serves reports whether a partition can be asked of the node.
func (s *Standing) serves(p events.Partition) bool { return s.Ready.Has(p) || s.Behind.Has(p) }

// mayServe reports whether a partition that the node serves may have workers of a model.
func (s *Standing) mayServe(p events.Partition, model string) bool {
	return s.Models[model].Has(p) || s.Unlisted.Has(p)
}

// counts reports whether a node has a partition, is not behind, and means to keep it.
func (r *Record) counts(p events.Partition) bool { return r.Ready.Has(p) && !r.Releasing.Has(p) }

// Seen is a record as it was found in the bucket.
type Seen struct {
	Record
	Revision uint64 `json:"revision"`
}

// Look is one look at all records.
type Look struct {
	Records []Seen

	// After is the beat of the own record that had been acknowledged before the look began, if each record came from
	// the bucket's leader; else 0.
	After uint64
}

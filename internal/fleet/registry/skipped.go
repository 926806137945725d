package registry

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// errOtherRank is the reason to skip a registration of a rank beyond [events.MaxRanks].
var errOtherRank = fmt.Errorf("ranks are numbered 0 to %d", events.MaxRanks-1)

// errOtherSize is the reason to skip a registration with another block size than the model's.
var errOtherSize = errors.New("another block size is registered for the model")

// skipped counts skipped registrations. skipped keeps only the last rank beyond [events.MaxRanks], so its memory is
// bounded. The registry's lock guards it.
type skipped struct {
	sizes uint64 // with another block size than the model's
	bad   uint64 // unreadable

	badTold time.Time // time of the last report of an unreadable record
	ranks   uint64    // of ranks beyond the limit
	last    events.RankKey
	at      time.Time // of last, by the server's clock
}

// skippedFor is the time for which a skipped registration is a problem.
const skippedFor = 10 * time.Minute

// rank counts a registration, and returns true for the first in a while.
func (s *skipped) rank(key events.RankKey, at time.Time) (first bool) {
	first = at.Sub(s.at) > skippedFor
	s.ranks, s.last, s.at = s.ranks+1, key, at
	return first
}

// unreadable counts an unreadable record, and returns true if it is to be reported. unreadable reports at most one per
// second, because a writer of many records must not fill the disk with log lines.
func (s *skipped) unreadable(now time.Time) (report bool) {
	s.bad++
	if report = now.Sub(s.badTold) >= time.Second; report {
		s.badTold = now
	}
	return report
}

// otherSize returns an error if a registration has another block size than the registered size of the model.
func (r *Registry) otherSize(record *Record) error {
	if size := r.cfg.BlockSize(record.Model); size != 0 && record.BlockSize != size {
		return fmt.Errorf("%w: %q has %d tokens, this one states %d", errOtherSize, record.Model, size, record.BlockSize)
	}
	return nil
}

// ModelsChanged must be called when the result of [Config.BlockSize] changes for a model.
func (r *Registry) ModelsChanged() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.kept)
	r.notify()
}

// markSkipped adds the skipped registrations to a status.
func (r *Registry) markSkipped(s *api.Status) {
	r.mu.Lock()
	beyond := r.skipped
	var others []string
	for key, w := range r.workers {
		if err := r.otherSize(&w.Record); err != nil && r.cfg.Mine(w.Partition) {
			others = append(others, fmt.Sprintf("%s: %v", key, err))
		}
	}
	r.mu.Unlock()
	if s.Events == nil {
		s.Events = map[string]uint64{}
	}
	s.Events["registrations_block_size"], s.Events["registrations_rank_beyond_limit"] = beyond.sizes, beyond.ranks
	s.Events["registrations_unreadable"] = beyond.bad
	if len(others) > 0 {
		slices.Sort(others)
		s.Problems = append(s.Problems, fmt.Sprintf("the registrations of %d ranks are skipped: %s; what to do: restart "+
			"their shims with the registered --block-size, or revoke their keys; if the registered size is wrong: "+
			"indexer models remove MODEL", len(others), First(others)))
	}
	if beyond.ranks > 0 && time.Since(beyond.at) < skippedFor {
		s.Problems = append(s.Problems, fmt.Sprintf("%d registrations of ranks beyond the limit were skipped, the last of "+
			"%s: %v; what to do: find the shim that writes them, by its worker, and revoke its key", beyond.ranks,
			beyond.last, errOtherRank))
	}
}

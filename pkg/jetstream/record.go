package jetstream

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// ErrBadRecord: the namespace's record is unreadable. [OpenNamespace] returns it, and [JoinNamespace] as a
// [RecordError].
var ErrBadRecord = errors.New("the namespace's record cannot be read")

// RecordError is the error of [JoinNamespace] if the namespace's record is missing or unreadable, and a new record
// could have another number of partitions than the log. A person must decide.
type RecordError struct {
	Namespace string
	Cause     error    // wraps [ErrNotFound] or [ErrBadRecord]
	Streams   []string // of the log, in the order of the partitions
	Gaps      bool     // a stream between two others is missing

	// Partitions is the number of partitions by the streams; 0 if unknown.
	Partitions uint32
}

func (e *RecordError) Error() string {
	state := "is missing"
	if errors.Is(e.Cause, ErrBadRecord) {
		state = "is unreadable (" + e.Cause.Error() + ")"
	}
	what := fmt.Sprintf("record %q in bucket %s %s", namespaceKey, Names(e.Namespace).MetaBucket(), state)
	const restore = "start one indexer with --restore-namespace"
	if len(e.Streams) == 0 {
		return what + ", and the log has no streams; " + restore + " to write a new record"
	}
	what += fmt.Sprintf(", but the log has %d streams, %s to %s", len(e.Streams), e.Streams[0],
		e.Streams[len(e.Streams)-1])
	if e.Gaps {
		return what + ", with gaps; " + restore + " and the original --partitions, or delete these " +
			"streams to start with an empty log"
	}
	return fmt.Sprintf("%s: a log of %d partitions; %s to write the record with %d partitions, "+
		"or delete these streams to start with an empty log", what, e.Partitions, restore, e.Partitions)
}

func (e *RecordError) Unwrap() error { return e.Cause }

// recordLost reports whether an error means that the namespace's record is missing or unreadable.
func recordLost(err error) bool { return errors.Is(err, ErrNotFound) || errors.Is(err, ErrBadRecord) }

// parseRecord decodes the namespace's record. The error wraps [ErrBadRecord], or [ErrMismatch] for another version.
func parseRecord(text []byte) (rec namespaceRecord, err error) {
	if err := strictjson.Unmarshal(text, &rec); err != nil {
		return rec, fmt.Errorf("%w: %w", ErrBadRecord, err)
	}
	switch {
	case rec.Version > namespaceVersion:
		return rec, fmt.Errorf("%w: it has version %d, this program supports version %d", ErrMismatch, rec.Version,
			namespaceVersion)
	case rec.Version != namespaceVersion:
		return rec, fmt.Errorf("%w: it has version %d", ErrBadRecord, rec.Version)
	case rec.Partitions == 0 || rec.Partitions > MaxPartitions:
		return rec, fmt.Errorf("%w: it has %d partitions, 1 to %d are possible", ErrBadRecord, rec.Partitions,
			MaxPartitions)
	}
	return rec, nil
}

// LostRecord looks for the streams of a namespace without a readable record. It returns nil if the namespace is new, or
// if the caller may not list streams.
func LostRecord(ctx context.Context, c *Conn, ns string) *RecordError {
	found, err := c.findLog(ctx, ns)
	if err != nil {
		return nil
	}
	_, found.Cause = readNamespace(ctx, openBucket(c, Names(ns).MetaBucket()), ns)
	if !recordLost(found.Cause) || len(found.Streams) == 0 && errors.Is(found.Cause, ErrNotFound) {
		return nil
	}
	return found
}

// createRecord writes the record of a new namespace, or of a namespace to restore. A record that another process has
// written meanwhile is no error.
//
// The record is older than every stream, because an indexer creates the record before the first stream. A log with
// streams therefore had a record. An interrupted start leaves a record without streams, and the next start creates the
// streams.
func createRecord(ctx context.Context, meta *Bucket, cfg NamespaceConfig) error {
	found, err := meta.c.findLog(ctx, cfg.Name)
	if err != nil {
		return err
	}
	// The record is read after the streams: another indexer may have written it and created streams meanwhile.
	entry, deleted, err := meta.last(ctx, namespaceKey)
	switch {
	case errors.Is(err, ErrNotFound) || err == nil && deleted:
		found.Cause = ErrNotFound
	case err != nil:
		return err
	default:
		if _, found.Cause = parseRecord(entry.Value); !errors.Is(found.Cause, ErrBadRecord) {
			return nil
		}
	}
	if !cfg.Restore && (len(found.Streams) > 0 || !errors.Is(found.Cause, ErrNotFound)) {
		return found
	}
	partitions := cmp.Or(cfg.Partitions, DefaultPartitions)
	if len(found.Streams) > 0 {
		if partitions, err = meta.c.restorable(ctx, found, cfg.Partitions); err != nil {
			return err
		}
	}
	err = meta.writeRecord(ctx, partitions, entry.Revision)
	if errors.Is(err, ErrConflict) {
		return nil
	}
	return err
}

// writeRecord writes the namespace's record if its key still has the revision; 0: no value.
func (b *Bucket) writeRecord(ctx context.Context, partitions uint32, revision uint64) error {
	text, err := json.Marshal(namespaceRecord{Version: namespaceVersion, Partitions: partitions,
		Created: time.Now().UTC().Truncate(time.Second)})
	if err == nil {
		err = b.replace(ctx, namespaceKey, text, revision)
	}
	return err
}

// findLog finds the streams of a namespace's log, independent of its record.
func (c *Conn) findLog(ctx context.Context, ns string) (*RecordError, error) {
	var found []uint32
	for offset := 0; ; {
		var page struct {
			Streams []string `json:"streams"`
			Total   int      `json:"total"`
		}
		args := map[string]any{"offset": offset, "subject": subjectRoot + ns + ".ev.>"}
		if err := c.call(ctx, "list the streams of namespace "+ns, "STREAM.NAMES", args, &page); err != nil {
			return nil, err
		}
		for _, name := range page.Streams {
			if p, ok := parseDecimal(strings.TrimPrefix(name, Names(ns).streamPrefix())); ok && p < MaxPartitions {
				found = append(found, p)
			}
		}
		if offset += len(page.Streams); len(page.Streams) == 0 || offset >= page.Total {
			break
		}
	}
	slices.Sort(found)
	found = slices.Compact(found)
	e := &RecordError{Namespace: ns}
	for _, p := range found {
		e.Streams = append(e.Streams, Names(ns).Stream(events.Partition(p)))
		e.Partitions = p + 1
	}
	if e.Gaps = e.Partitions != uint32(len(found)); e.Gaps {
		e.Partitions = 0
	}
	return e, nil
}

// restorable returns the number of partitions for a new record of an existing log. wanted is the operator's number, or
// 0. The messages in the log must belong to their partitions by that number.
func (c *Conn) restorable(ctx context.Context, found *RecordError, wanted uint32) (uint32, error) {
	last, _ := parseDecimal(strings.TrimPrefix(found.Streams[len(found.Streams)-1], Names(found.Namespace).streamPrefix()))
	partitions := cmp.Or(found.Partitions, wanted)
	switch {
	case partitions == 0:
		return 0, found
	case wanted != 0 && wanted != partitions, partitions <= last:
		return 0, fmt.Errorf("%w: --partitions is %d, and the log has the streams of %d", ErrMismatch, wanted, last+1)
	}
	fit, stray := 0, 0
	for _, name := range found.Streams {
		subjects, err := c.subjects(ctx, "list the workers in "+name, name, ">")
		if err != nil {
			return 0, err
		}
		for _, subject := range subjects {
			if _, p, key, err := parseEventSubject(subject); err == nil {
				if own, err := PartitionOf(key.Instance, partitions); err == nil && own == p {
					fit++
				} else {
					stray++
				}
			}
		}
	}
	if stray > fit {
		return 0, fmt.Errorf("%w: with %d partitions, %d of %d workers' ranks in the log would be in other partitions; "+
			"set the original --partitions, or delete its streams to start with an empty log", ErrMismatch, partitions,
			stray, fit+stray)
	}
	return partitions, nil
}

package jetstream

import (
	"context"
	"errors"
)

// StreamUse has the size of a stream of a namespace, or of a bucket's stream.
type StreamUse struct {
	Name     string `json:"name"`
	Bucket   string `json:"bucket,omitempty"` // empty: a partition's log, or the recorded requests
	Messages uint64 `json:"messages"`
	Bytes    uint64 `json:"bytes"`
}

// NamespaceStreams returns all streams and buckets of a namespace, independent of its record. The bucket with the
// record is the last.
func (c *Conn) NamespaceStreams(ctx context.Context, ns string) (list []StreamUse, err error) {
	if err := CheckNamespace(ns); err != nil {
		return nil, err
	}
	log, err := c.findLog(ctx, ns)
	if err != nil {
		return nil, err
	}
	var names []StreamUse
	for _, name := range log.Streams {
		names = append(names, StreamUse{Name: name})
	}
	of := Names(ns)
	names = append(names, StreamUse{Name: of.RecordingStream()})
	for _, bucket := range []string{of.SecretBucket(), of.SnapshotBucket(), of.NodesBucket(), of.WorkersBucket(),
		of.MetaBucket()} {
		names = append(names, StreamUse{Name: BucketStream(bucket), Bucket: bucket})
	}
	for _, s := range names {
		a, err := c.streamInfo(ctx, s.Name)
		if errors.Is(err, ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		s.Messages, s.Bytes = a.State.Messages, a.State.Bytes
		list = append(list, s)
	}
	return list, nil
}

// DeleteStream deletes a stream of [Conn.NamespaceStreams] with all messages. A missing stream is no error.
func (c *Conn) DeleteStream(ctx context.Context, name string) error {
	err := c.call(ctx, "delete stream "+name, "STREAM.DELETE."+name, nil, nil)
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	return err
}

package jetstream

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// EnsureNodes opens the bucket in which indexer nodes announce themselves, and creates it if it is missing. A value
// that is not written again goes after life, by the server's clock: that tidies up, and decides nothing. The bucket has
// as many replicas as the namespace.
func (n *Namespace) EnsureNodes(ctx context.Context, life time.Duration) (*Bucket, error) {
	return ensureBucket(ctx, n.c, nodesBucket(n.name), BucketConfig{TTL: life, Replicas: n.replicas}, 1)
}

// All reads every value of a small bucket with one request, from whichever replica answers, which may be a moment
// behind. It tries once, for as long as one attempt takes.
func (b *Bucket) All(ctx context.Context) (entries []Entry, err error) {
	action := "read bucket " + b.name
	args, err := json.Marshal(map[string]any{"multi_last": []string{keySubject(b.name, ">")}, "batch": 1024})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", action, err)
	}
	m := &nats.Msg{Subject: b.c.api + "DIRECT.GET." + b.stream, Data: args}
	err = b.c.collect(ctx, b.c.attempt, m, func(m *nats.Msg) (bool, error) {
		switch m.Header.Get("Status") {
		case "":
			entry, err := b.entry(m)
			if err == nil && m.Header.Get(headerKVOperation) == "" {
				entries = append(entries, entry)
			}
			return false, err
		case "204", "404": // the end; nothing there
			return true, nil
		case "503":
			return false, nats.ErrNoResponders
		}
		return false, fmt.Errorf("%s %s", m.Header.Get("Status"), m.Header.Get("Description"))
	})
	return entries, failed(action, err)
}

// entry reads an answer to a direct get.
func (b *Bucket) entry(m *nats.Msg) (Entry, error) {
	last, err := readDirect(m)
	if err != nil {
		return Entry{}, err
	}
	key, ok := strings.CutPrefix(last.Subject, keySubject(b.name, ""))
	if !ok {
		return Entry{}, fmt.Errorf("the answer is of subject %.128q", last.Subject)
	}
	return Entry{Key: key, Value: last.Data, Revision: uint64(last.Seq), Written: time.UnixMilli(int64(last.Time))}, nil
}

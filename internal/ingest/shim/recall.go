package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// recallPatience is how long a node's answer is waited for.
const recallPatience = 2 * time.Second

// ServeRecall answers shims' requests for their rank's state in the snapshots, until the returned function is called.
// Nodes serve it before and after readiness. So a shim needs no permission to read snapshots, which contain other
// ranks.
func ServeRecall(ns *jetstream.Namespace) (stop func(context.Context), err error) {
	prefix := jetstream.Names(ns.Name()).RecallPrefix()
	answer := func(ctx context.Context, r jetstream.Request) jetstream.Response {
		p, key, ok := jetstream.ParseWorkerKey(strings.TrimPrefix(r.Subject, prefix))
		if !ok {
			return jetstream.Response{Code: 400,
				Description: fmt.Sprintf("subject %.128q: want %s<p>.<instance>.<rank>", r.Subject, prefix)}
		}
		if own, err := ns.PartitionOf(key.Instance); err != nil || own != p {
			return jetstream.Response{Code: 400, Description: fmt.Sprintf("%v is of partition %d, not %d", key, own, p)}
		}
		found, err := NewStreamLog(ns, key, nil).lastInSnapshot(ctx, p)
		if err != nil {
			return jetstream.Response{Code: 503, Description: err.Error()}
		}
		body, err := json.Marshal(found)
		if err != nil {
			return jetstream.Response{Code: jetstream.CodeInternal, Description: err.Error()}
		}
		return jetstream.Response{ContentType: jetstream.ContentJSON, Body: body}
	}
	service, err := jetstream.Serve(ns.Conn(), jetstream.ServiceConfig{
		Name: "kvatlas-recall", Version: "0.0.0", Description: "the state of a rank in snapshots, namespace " + ns.Name(),
		Endpoints: []jetstream.Endpoint{{Name: "recall", Subject: prefix + "*.*.*", QueueGroup: "kvatlas",
			Handler: answer}},
	})
	if err != nil {
		return nil, err
	}
	return service.Stop, nil
}

// recall requests the rank's state in the snapshots from a node, and reads the snapshots itself if no node replies.
func (l *StreamLog) recall(ctx context.Context, p events.Partition) (found Published, err error) {
	subject, err := jetstream.Names(l.ns.Name()).Recall(p, l.key)
	if err != nil {
		return Published{}, err
	}
	asking, cancel := context.WithTimeout(ctx, recallPatience)
	defer cancel()
	reply, asked := l.ns.Conn().Request(asking, subject, "", nil)
	if asked == nil {
		if asked = strictjson.Unmarshal(reply.Body, &found); asked == nil {
			return found, nil
		}
	}
	found, err = l.lastInSnapshot(ctx, p)
	if errors.Is(err, jetstream.ErrDenied) {
		return Published{},
			fmt.Errorf("no indexer node returns the state of %v in the snapshots, and this user may not read snapshots: %w; %w",
				l.key, asked, err)
	}
	return found, err
}

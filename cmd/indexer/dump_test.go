package main

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestSnapshotsNotWritten: a dump reports an error if no node has written a snapshot of some partitions, even with new
// snapshots requested first, because the dump would print the old snapshots.
func TestSnapshotsNotWritten(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	server := natskit.Start(t, natsserver.Options{Listen: "127.0.0.1:0"})
	conn := natskit.Connect(t, server)
	namespace := jetstream.NamespaceConfig{Name: "default", Partitions: 4} // a dump needs a namespace
	if _, err := jetstream.JoinNamespace(ctx, conn, namespace); err != nil {
		t.Fatal(err)
	}
	service, err := jetstream.Serve(conn, jetstream.ServiceConfig{Name: "node", Version: "1.0.0",
		Endpoints: []jetstream.Endpoint{{Name: ops.Snapshot, Subject: jetstream.Names("default").Query(ops.Snapshot),
			Handler: func(_ context.Context, r jetstream.Request) jetstream.Response {
				body, err := api.Marshal(r.ContentType, &api.SnapshotList{Missing: []events.Partition{1, 3}})
				if err != nil {
					t.Error(err)
				}
				return jetstream.Response{Body: body}
			}}}})
	if err != nil {
		t.Fatal(err)
	}
	defer service.Stop(ctx)
	for _, args := range [][]string{{"snapshot", "now"}, {"dump", "--now"}} {
		code, said := program(t, append(args, "--nats", server.URL(), "--timeout", "1m")...)
		if code != 1 || !strings.Contains(said, "no node has written a snapshot of partitions 1,3") {
			t.Errorf("%q ended with %d and printed %q", args, code, said)
		}
	}
}

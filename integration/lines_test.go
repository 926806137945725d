package integration

import (
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/vmihailenco/msgpack/v5"
)

// routerLine is a router event that stores blocks of a prompt, which follow each other.
func routerLine(t testing.TB, instance string, rank events.Rank, id events.EventID, prompt []uint32, from int) []byte {
	t.Helper()
	h, err := events.NewHasher(blockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	e := events.Event{Kind: events.Stored, Tier: events.Device, Locals: h.Hash(nil, prompt)[from:], HasParent: from > 0, Parent: events.BlockHash(99 + from)}
	for i := range e.Locals {
		e.Blocks = append(e.Blocks, events.BlockHash(100+from+i))
	}
	return events.AppendRouterEvent(nil, events.RankKey{Instance: events.WorkerID(instance), Rank: rank}, id, &e)
}

// TestLines has an engine of no known kind tell what it holds in lines, on a Unix socket: two workers on one connection, bad lines between,
// a restarted shim that goes on, a gap that clears, and a beginning anew.
func TestLines(t *testing.T) {
	x := startIndexer(t, t.TempDir(), "")
	socket := filepath.Join(t.TempDir(), "lines")
	launch := func() (*process, net.Conn) {
		p := start(t, "worker-shim", "run", "--source", "ndjson", "--engine", "ipc://"+socket, "--model", "m", "--block-size", "16", "--nats", x.nats)
		for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
			c, err := net.Dial("unix", socket)
			if err == nil {
				t.Cleanup(func() { c.Close() })
				return p, c
			}
			if time.Now().After(deadline) {
				t.Fatalf("%v\n%s", err, p.saying())
			}
		}
	}
	prompt := tokens(1, 6*blockSize)
	say := func(to io.Writer, lines ...string) {
		t.Helper()
		if _, err := io.WriteString(to, strings.Join(lines, "\n")+"\n"); err != nil {
			t.Fatal(err)
		}
	}
	one := func(id events.EventID, blocks, from int) string {
		return string(routerLine(t, "a", 0, id, prompt[:blocks*blockSize], from))
	}
	p, c := launch()
	say(c, one(1, 2, 0), "this is no JSON", `{"worker_id":"a","event":{"event_id":2,"data":{"renamed":{}}}}`, one(3, 4, 2),
		string(routerLine(t, "b", 0, 1, prompt[:blockSize], 0)))
	x.waitDepth(t, "m", prompt, "a", 4)
	x.waitDepth(t, "m", prompt, "b", 1)
	p.waitFor("line=3") // an empty line counts
	p.stop()
	p, c = launch()
	say(c, one(4, 5, 4))
	x.waitDepth(t, "m", prompt, "a", 5)
	if strings.Contains(p.saying(), "new incarnation") {
		t.Fatalf("did not go on where it was:\n%s", p.saying())
	}
	say(c, one(9, 6, 5)) // 5 to 8 are missing
	x.waitDepth(t, "m", prompt, "a", 0)
	say(c, one(1, 3, 0)) // the engine begins anew
	x.waitDepth(t, "m", prompt, "a", 3)
	x.waitDepth(t, "m", prompt, "b", 1)
}

// TestDynamoOverNATS has Dynamo's form of events published over NATS: as MessagePack in its envelope, and as JSON.
func TestDynamoOverNATS(t *testing.T) {
	x := startIndexer(t, t.TempDir(), "")
	const subject = "namespace.dynamo.component.backend.kv-events"
	p := start(t, "worker-shim", "run", "--source", "dynamo-nats", "--engine", subject, "--model", "m", "--block-size", "16", "--nats", x.nats)
	conn, err := jetstream.Connect(t.Context(), jetstream.ConnOptions{URLs: []string{x.nats}, Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	prompt := tokens(1, 2*blockSize)
	h, err := events.NewHasher(blockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	var blocks []any
	for i, local := range h.Hash(nil, prompt) {
		blocks = append(blocks, map[string]any{"block_hash": i + 1, "tokens_hash": uint64(local), "mm_extra_info": nil})
	}
	inner, err := msgpack.Marshal([]any{map[string]any{"worker_id": 7, "storage_tier": "device", "event": map[string]any{
		"event_id": 1, "dp_rank": 1, "data": map[string]any{"stored": map[string]any{"parent_hash": nil, "blocks": blocks}}}}})
	if err != nil {
		t.Fatal(err)
	}
	envelope, err := msgpack.Marshal(map[string]any{"topic": "kv-events", "publisher_id": 7, "sequence": 1, "published_at": 1, "payload": inner})
	if err != nil {
		t.Fatal(err)
	}
	publish := func(data []byte) {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, _ = conn.Request(ctx, subject, "", data) // nobody answers an event
	}
	for deadline := time.Now().Add(patience); !strings.Contains(p.saying(), "starting"); { // said twice it is a duplicate
		if time.Now().After(deadline) {
			t.Fatal(p.saying())
		}
		publish(envelope)
	}
	publish(routerLine(t, "8", 0, 1, prompt[:blockSize], 0))
	publish([]byte("what is this"))
	x.waitDepth(t, "m", prompt, "7", 2)
	x.waitDepth(t, "m", prompt, "8", 1)
	p.waitFor(fmt.Sprintf("none of Dynamo's router events.*subject=%s", subject))
}

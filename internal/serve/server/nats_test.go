package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

func connect(t *testing.T) *jetstream.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	server := natskit.Start(t, natsserver.Options{Listen: "127.0.0.1:0"})
	conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{URLs: []string{server.URL()}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	return conn
}

// indexer answers every query after a permission.
type indexer struct {
	api.Indexer
	gate chan struct{} // nil: at once
}

func (x *indexer) Find(ctx context.Context, q *api.Query) (*api.Answer, error) {
	if x.gate != nil {
		select {
		case <-x.gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	a := &api.Answer{Model: q.Model, Blocks: len(q.Hashes), Complete: true, Workers: []api.Overlap{},
		Partitions: []api.PartitionStatus{}}
	if q.Model == "huge" {
		a.Reason = api.Reason(strings.Repeat("x", 2<<20))
	}
	return a, nil
}

// TestEveryRequestIsAnsweredOrCounted sends 200 queries of 800 hashes at once to a node with room for ten. Every query
// gets an answer or the error busy, and the counts are equal to the replies.
func TestEveryRequestIsAnsweredOrCounted(t *testing.T) {
	t.Parallel()
	conn := connect(t)
	x := &indexer{gate: make(chan struct{})}
	s := &Server{Settings: Settings{Conn: conn, Namespace: "default", NoForwarding: true, QueryWorkers: 2, QueryQueue: 8}}
	service := &service{s: s, answer: api.Handler{Indexer: x}}
	if err := service.serveQueries(); err != nil {
		t.Fatal(err)
	}
	defer service.stop(t.Context())
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	body, _ := json.Marshal(api.Query{Model: "m", Hashes: make(api.Hashes, 800)})
	const asked = 200
	got := map[string]uint64{}
	var mu sync.Mutex
	var all sync.WaitGroup
	for range asked {
		all.Go(func() {
			reply, err := conn.Request(ctx, jetstream.Names("default").Query(ops.Find), api.JSON, body)
			outcome := ops.OK
			var refused *jetstream.ServiceError
			if errors.As(err, &refused) {
				var e api.ErrorBody
				if json.Unmarshal(reply.Body, &e) != nil || e.Error == nil ||
					e.Error.Code.HTTPStatus() != refused.Code {
					t.Errorf("%d %s has the body %q", refused.Code, refused.Description, reply.Body)
					return
				}
				outcome = string(e.Error.Code)
			} else if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			got[outcome]++
			if outcome != ops.OK && got[outcome] == asked-10 { // the remaining requests have a place
				close(x.gate)
			}
			mu.Unlock()
		})
	}
	all.Wait()
	ok, busy := got["ok"], got["busy"]
	if ok < 8 || busy < asked/2 || ok+busy != asked {
		t.Fatalf("%v", got)
	}
	want := fmt.Sprint([]api.RequestCount{{Transport: "nats", Operation: "find", Outcome: "busy", Count: busy},
		{Transport: "nats", Operation: "find", Outcome: "ok", Count: ok}})
	// requests are counted after the reply
	testkit.Eventually(t, "the counts are "+want, func() (bool, string) {
		counts := fmt.Sprint(s.outcomes.Counts())
		return counts == want, counts
	})
	if list := s.outcomes.Problems(time.Now()); len(list) != 1 ||
		!strings.Contains(list[0], fmt.Sprint(busy, " requests were refused as busy")) ||
		!strings.Contains(list[0], "--query-queue") {
		t.Errorf("problems: %q", list)
	}
	stats, err := conn.Request(ctx, "$SRV.STATS.kvatlas-indexer", "", nil)
	if err != nil || !strings.Contains(string(stats.Body),
		fmt.Sprintf(`"data":{"errors":%d,"outcomes":{"busy":%d,"ok":%d}}`, busy, busy, ok)) {
		t.Errorf("%s %v", stats.Body, err)
	}
}

// TestErrorsHaveBodies: every refused request gets a body with the reason in the format of the request, also before its
// handler runs.
func TestErrorsHaveBodies(t *testing.T) {
	t.Parallel()
	conn := connect(t)
	s := &Server{Settings: Settings{Conn: conn, Namespace: "default", NoForwarding: true, QueryWorkers: 2, QueryQueue: 8}}
	service := &service{s: s, answer: api.Handler{Indexer: &indexer{}}}
	if err := service.serveQueries(); err != nil {
		t.Fatal(err)
	}
	defer service.stop(t.Context())
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	huge := &api.Query{Model: "huge", Hashes: api.Hashes{}}
	for _, form := range []string{api.JSON, api.MsgPack, "application/x-msgpack"} {
		contentType, _ := api.ContentType(form)
		answer, _ := api.Marshal(contentType, huge)
		for _, c := range []struct {
			body []byte
			code api.Code
			want string
		}{
			{make([]byte, jetstream.MaxValue+1), api.CodeTooLarge,
				"the request has 900001 bytes, more than 900000, the limit over NATS; send hashes instead of tokens, or use HTTP, with a limit of 8388608 (8 MiB)"},
			{answer, api.CodeTooLarge, "the limit over NATS; request less"},
			{nil, api.CodeMalformed, "empty"},
		} {
			reply, err := conn.Request(ctx, jetstream.Names("default").Query(ops.Find), form, c.body)
			var refused *jetstream.ServiceError
			var e api.ErrorBody
			if !errors.As(err, &refused) || refused.Code != c.code.HTTPStatus() || reply.ContentType != contentType ||
				api.Unmarshal(contentType, reply.Body, &e) != nil ||
				e.Error == nil || e.Error.Code != c.code || !strings.Contains(e.Error.Message, c.want) {
				t.Errorf("%s: %v with the body %q, want %s: %s", form, err, reply.Body, c.code, c.want)
			}
		}
	}
	reply, err := conn.Request(ctx, jetstream.Names("default").Query(ops.Find), "text/plain",
		[]byte(`{"model":"m","hashes":[]}`))
	if err == nil || !strings.Contains(string(reply.Body), `"code":"wrong_content_type"`) {
		t.Errorf("%s %v", reply.Body, err)
	}
	for code, want := range map[int]api.Code{
		jetstream.CodeBad: api.CodeMalformed, jetstream.CodeTooLarge: api.CodeTooLarge,
		jetstream.CodeBusy: api.CodeBusy, jetstream.CodeStopping: api.CodeNotReady,
		jetstream.CodeInternal: api.CodeTooLarge, jetstream.CodeFault: api.CodeInternal,
	} {
		r := refuse(jetstream.Request{ContentType: api.MsgPack}, code, "why")
		var e api.ErrorBody
		if api.Unmarshal(api.MsgPack, r.Body, &e) != nil || e.Error == nil || e.Error.Code != want ||
			r.Code != want.HTTPStatus() || r.Outcome != string(want) || !strings.HasPrefix(e.Error.Message, "why") {
			t.Errorf("%d: %+v", code, r)
		}
	}
	// The Go client reads the errors.
	asker, err := client.NATS(conn.NATS(), "default", client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	var failure *api.Error
	if _, err := asker.Find(ctx, huge); !errors.As(err, &failure) || failure.Code != api.CodeTooLarge {
		t.Error(err)
	}
	if a, err := asker.Find(ctx, &api.Query{Model: "m", Hashes: api.Hashes{}}); err != nil || !a.Complete {
		t.Error(a, err)
	}
}

package server

import (
	"context"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/choose/guess"
	"github.com/kvatlas/kvatlas/internal/index/scatter"
	"github.com/kvatlas/kvatlas/internal/operate/metrics"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestUnheardAnswers checks that the origin of a query delivers an answer without a receiver.
func TestUnheardAnswers(t *testing.T) {
	conn := connect(t)
	_, queries := metrics.New(metrics.Config{Figures: func() *metrics.Figures { return &metrics.Figures{} }})
	s := &Server{Settings: Settings{Conn: conn, Namespace: "n", ID: "b"}, queries: queries}
	f := &finisher{server: s, unheard: unheard{subject: "kv.v1.n.node.b.unheard."}}
	delivered, arrived := make(chan jetstream.Request, 1), make(chan jetstream.Request, 1)
	for subject, heard := range map[string]func(jetstream.Request){
		"kv.v1.n.node.b.unheard.*": f.redeliver,
		"kv.v1.n.node.a.deliver":   func(r jetstream.Request) { delivered <- r },
	} {
		stop, err := conn.Subscribe(subject, heard)
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
	}
	service, err := jetstream.Serve(conn, jetstream.ServiceConfig{Name: "test", Version: "0.0.0",
		Endpoints: []jetstream.Endpoint{{Name: "finish", Subject: "finish", Handler: func(_ context.Context,
			r jetstream.Request) jetstream.Response {
			query := &scatter.Forwarded{Origin: "a", ContentType: api.JSON}
			return jetstream.Response{Body: r.Body, Undelivered: f.unheard.keep(query, r.Reply, r.Body)}
		}}}})
	if err != nil {
		t.Fatal(err)
	}
	defer service.Stop(t.Context())
	if err := conn.NATS().Flush(); err != nil {
		t.Fatal(err)
	}
	const client = "_INBOX.client"
	for range 3 * len(f.unheard.ring) {
		if err := conn.Forward("finish", "", time.Second, "", client, []byte("an answer")); err != nil {
			t.Fatal(err)
		}
		select {
		case r := <-delivered:
			if strings.Count(string(r.Body), client) != 1 || !strings.HasSuffix(string(r.Body), "an answer") {
				t.Fatalf("the origin is to deliver %q", r.Body)
			}
			stop, err := conn.Subscribe(client, func(r jetstream.Request) { arrived <- r })
			if err != nil {
				t.Fatal(err)
			}
			s.deliver(r)
			if got := <-arrived; string(got.Body) != "an answer" || got.ContentType != api.JSON {
				t.Fatalf("the client got %+v", got)
			}
			stop()
			if err := conn.NATS().Flush(); err != nil {
				t.Fatal(err)
			}
		case <-time.After(testkit.Patience):
			t.Fatal("the origin was not told")
		}
	}
	large := f.unheard.keep(&scatter.Forwarded{}, "client", make([]byte, maxUnheard+1))
	if _, kept := f.unheard.remove("kv.v1.n.node.b.unheard.0"); kept || large != "" {
		t.Error("an answer that was not kept is present")
	}
	s.deliver(jetstream.Request{Body: []byte("nonsense")})
}

// TestSummary: the counts of a summary are the counts of its answer.
func TestSummary(t *testing.T) {
	held := func(name string, device, host uint32) api.Overlap {
		return api.Overlap{Instance: "w" + "-" + "x", Device: device, Host: host, Endpoint: name}
	}
	for _, workers := range [][]api.Overlap{
		{}, {held("a", 0, 0)}, {held("a", 3, 0), held("b", 2, 0)}, {held("a", 1, 0), held("b", 0, 5), held("c", 0, 5)},
		{held("a", 2, 2), held("b", 4, 0), held("c", 0, 4)},
	} {
		whole := &api.Answer{Blocks: 8, Complete: true, Workers: workers, L3: api.L3{FromStart: 2}}
		var of, ofSummary holders
		of.readAnswer(whole)
		short := summary(whole)
		ofSummary.readAnswer(short)
		if of.list[0] != ofSummary.list[0] || of.shared != ofSummary.shared || of.incomplete != ofSummary.incomplete ||
			len(short.Workers) > 2 || len(workers) > 0 && !reflect.DeepEqual(short.Workers[0], workers[0]) {
			t.Errorf("of %+v: %+v, not %+v", workers, ofSummary, of)
		}
	}
}

// TestUnheardRing: a request for a dropped answer affects no other request.
func TestUnheardRing(t *testing.T) {
	u := unheard{subject: "s."}
	var subjects []string
	for range len(u.ring) + 1 {
		subjects = append(subjects, u.keep(&scatter.Forwarded{Origin: "a"}, "r", []byte("x")))
	}
	if _, kept := u.remove(subjects[0]); kept {
		t.Error("the oldest is still there")
	}
	if _, kept := u.remove(subjects[len(u.ring)]); !kept {
		t.Error("asking for one that is gone has lost the newest")
	}
}

// other is a view in which another node serves all partitions.
type other struct{}

func (other) Serving(events.Partition) []string      { return []string{"b"} }
func (other) Fit(events.Partition) int               { return 1 }
func (other) MayServe(events.Partition, string) bool { return true }
func (other) Finishes(string) bool                   { return true }

// untilWhen is an indexer that reports the deadline of a query.
type untilWhen struct {
	api.Indexer
	told chan time.Time
}

func (x *untilWhen) Find(ctx context.Context, q *api.Query) (*api.Answer, error) {
	until, _ := ctx.Deadline()
	x.told <- until
	return &api.Answer{Model: q.Model, Complete: true}, nil
}

// TestDeadlineOfAForwardInVain checks that this node answers a query without an answer of the finisher. The deadline_ms
// begins with the arrival of the query, not with the timeout of the finisher.
func TestDeadlineOfAForwardInVain(t *testing.T) {
	_, queries := metrics.New(metrics.Config{Figures: func() *metrics.Figures { return &metrics.Figures{} }})
	guesses, err := guess.New(guess.Config{})
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{Settings: Settings{Namespace: "n", ID: "a"}, queries: queries, guesses: guesses,
		ready: make(chan struct{})}
	close(s.ready)
	forwarded := 0
	s.scatter = scatter.New(scatter.Config{Self: "a", Partitions: 1, Hedges: &rpc.Budget{},
		View:    func() scatter.View { return other{} },
		Forward: func(string, time.Duration, string, string, []byte) error { forwarded++; return nil }})
	told := make(chan time.Time, 1)
	handle := (&service{s: s}).findOverNATS(api.Handler{Indexer: &untilWhen{told: told}})
	response := handle(t.Context(), jetstream.Request{Reply: "client", ContentType: api.JSON,
		Body: []byte(`{"model":"m","hashes":[1],"l3":"off","deadline_ms":60000}`)})
	latest := time.Now().Add(time.Minute)
	if response.Later == nil {
		t.Fatalf("the query is not forwarded: %+v", response)
	}
	answered := make(chan jetstream.Response, 1)
	response.Later(func(r jetstream.Response) { answered <- r })
	select {
	case until := <-told:
		if until.After(latest) {
			t.Errorf("the deadline is %v too late", until.Sub(latest))
		}
	case <-time.After(testkit.Patience):
		t.Fatal("it is not answered here")
	}
	if r := <-answered; forwarded != 1 || r.Code != 0 {
		t.Errorf("forwarded %d times, %+v", forwarded, r)
	}
}

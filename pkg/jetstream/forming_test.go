package jetstream

import (
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// TestStreamWaitsForServers creates a stream, and raises another's replicas, while the servers answer as before their
// leader has contacted all of them. The created stream is missing at first, as while another client creates it. The
// answers are nats-server's own: a real cluster is in this state for some milliseconds only.
func TestStreamWaitsForServers(t *testing.T) {
	t.Parallel()
	srv := plainServer(t, &server.Options{})
	conn, err := Connect(ctxFor(t), ConnOptions{URLs: []string{srv.ClientURL()}, Core: true})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	nc, err := nats.Connect(srv.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	answer := func(subject string, texts ...string) {
		_, err := nc.Subscribe(subject, func(m *nats.Msg) {
			_ = m.Respond([]byte(texts[0]))
			texts = texts[min(1, len(texts)-1):]
		})
		if err == nil {
			err = nc.Flush()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	missing := `{"error":{"code":404,"err_code":10059,"description":"stream not found"}}`
	answer("$JS.API.STREAM.INFO.wanted", missing, missing, missing,
		`{"config":{"name":"wanted","num_replicas":3}}`, missing)
	answer("$JS.API.STREAM.CREATE.wanted",
		`{"error":{"code":400,"err_code":10005,"description":"no suitable peers for placement, peer offline"}}`, `{}`)
	want := jetstream.StreamConfig{Name: "wanted", Subjects: []string{"wanted"}, Replicas: 3}
	amended := false
	err = conn.ensure(ctxFor(t), want, func(*jetstream.StreamConfig) error { amended = true; return nil })
	if err != nil || !amended {
		t.Errorf("%v, the stream is there: %v", err, amended)
	}

	answer("$JS.API.STREAM.INFO.there", `{"config":{"name":"there","num_replicas":1}}`)
	answer("$JS.API.STREAM.UPDATE.there",
		`{"error":{"code":400,"err_code":10005,"description":"no suitable peers for placement, peer offline"}}`, `{}`)
	err = conn.ensure(ctxFor(t), jetstream.StreamConfig{Name: "there"}, func(there *jetstream.StreamConfig) error {
		there.Replicas = 3
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

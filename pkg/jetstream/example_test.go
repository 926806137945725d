package jetstream_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// embedded starts a server in a separate folder, with a namespace of four partitions.
func embedded(ctx context.Context) (ns *jetstream.Namespace, stop func()) {
	dir, err := os.MkdirTemp("", "kvatlas")
	if err != nil {
		log.Fatal(err)
	}
	srv, err := natsserver.Start(ctx, natsserver.Options{Dir: dir})
	if err != nil {
		log.Fatal(err)
	}
	c, err := jetstream.Connect(ctx, jetstream.ConnOptions{Server: srv})
	if err != nil {
		log.Fatal(err)
	}
	ns, err = jetstream.JoinNamespace(ctx, c, jetstream.NamespaceConfig{Name: "prod", Partitions: 4})
	if err != nil {
		log.Fatal(err)
	}
	if err := ns.EnsureStreams(ctx, jetstream.LogConfig{MaxBytes: 64 << 20}); err != nil {
		log.Fatal(err)
	}
	return ns, func() {
		c.Close()
		srv.Stop()
		_ = os.RemoveAll(dir)
	}
}

// A shim publishes, and a node reads the messages.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	ns, stop := embedded(ctx)
	defer stop()

	pub, err := ns.OpenPublisher(ctx, events.RankKey{Instance: "vllm-7", Rank: 0}, jetstream.PublisherOptions{})
	if err != nil {
		log.Fatal(err)
	}
	if _, ok := pub.Found(); !ok {
		fmt.Println("a new worker")
	}
	seq, err := pub.Publish(ctx, [][]byte{[]byte("stored A B"), []byte("removed A")})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("acknowledged up to", seq)

	updates := make(chan jetstream.Update)
	r, err := ns.StartReader(jetstream.ReaderConfig{Partition: pub.Partition(),
		Deliver: func(ctx context.Context, u jetstream.Update) {
			select {
			case updates <- u:
			case <-ctx.Done():
			}
		}})
	if err != nil {
		log.Fatal(err)
	}
	defer r.Stop()
	for u := range updates {
		for _, m := range u.Messages {
			fmt.Printf("%d %s\n", m.Seq, m.Data)
		}
		if n, ok := u.Notice.(jetstream.CaughtUp); ok {
			fmt.Println(n)
			break
		}
	}
	// Output:
	// a new worker
	// acknowledged up to 2
	// 1 stored A B
	// 2 removed A
	// caught up at 2
}

// A snapshot is its chunks and then its manifest, unless another writer has stored a manifest meanwhile. Then a sweep
// removes chunks without a reference.
func ExampleBucket_Commit() {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	ns, stop := embedded(ctx)
	defer stop()
	snaps, err := ns.EnsureSnapshots(ctx, jetstream.BucketConfig{})
	if err != nil {
		log.Fatal(err)
	}

	chunk := func(id string) jetstream.Value {
		return jetstream.Value{Key: "p0.c." + id, Data: []byte("content of " + id)}
	}
	manifest := func(text string) jetstream.Value {
		return jetstream.Value{Key: "p0.manifest", Data: []byte(text)}
	}
	first, err := snaps.Commit(ctx, []jetstream.Value{chunk("aa"), chunk("bb")}, manifest("aa bb"), 0)
	if err != nil {
		log.Fatal(err)
	}
	// The manifest of that revision refers to bb, so bb need not be stored again.
	second, err := snaps.Commit(ctx, []jetstream.Value{chunk("cc")}, manifest("bb cc"), first)
	if err != nil {
		log.Fatal(err)
	}
	_, err = snaps.Commit(ctx, []jetstream.Value{chunk("dd")}, manifest("dd"), first)
	fmt.Println("a late writer:", err != nil)

	keep := map[string]bool{"p0.manifest": true, "p0.c.bb": true, "p0.c.cc": true}
	n, err := snaps.Sweep(ctx, "p0.", func(key string) bool { return keep[key] }, second)
	if err != nil {
		log.Fatal(err)
	}
	keys, err := snaps.Keys(ctx, "")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("swept", n, "left", keys)
	// Output:
	// a late writer: true
	// swept 1 left [p0.c.bb p0.c.cc p0.manifest]
}

func ExampleServe() {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	ns, stop := embedded(ctx)
	defer stop()
	subject := jetstream.Names(ns.Name()).Query("find")
	svc, err := jetstream.Serve(ns.Conn(), jetstream.ServiceConfig{
		Name: "kvatlas", Version: "1.0.0",
		Endpoints: []jetstream.Endpoint{{
			Name: "find", Subject: subject, QueueGroup: "kvatlas",
			Handler: func(_ context.Context, r jetstream.Request) jetstream.Response {
				if len(r.Body) == 0 {
					return jetstream.Response{Code: 400, Description: "no tokens"}
				}
				return jetstream.Response{ContentType: jetstream.ContentJSON, Body: []byte(`{"worker":"vllm-7"}`)}
			},
		}},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer svc.Stop(ctx)
	reply, err := ns.Conn().Request(ctx, subject, jetstream.ContentJSON, []byte(`{"tokens":[1,2,3]}`))
	fmt.Println(string(reply.Body), err)
	_, err = ns.Conn().Request(ctx, subject, jetstream.ContentJSON, nil)
	fmt.Println(err)
	_, err = ns.Conn().Request(ctx, jetstream.Names(ns.Name()).Query("other"), "", nil)
	fmt.Println(err)
	// Output:
	// {"worker":"vllm-7"} <nil>
	// request kv.v1.prod.q.find: no tokens (400)
	// request kv.v1.prod.q.other: no service is subscribed to this subject
}

func ExampleNames() {
	key := events.RankKey{Instance: "pod.7/engine", Rank: 1}
	p, _ := jetstream.PartitionOf(key.Instance, 16)
	subject, _ := jetstream.Names("prod").Event(p, key)
	fmt.Println(subject)
	// Output:
	// kv.v1.prod.ev.12.pod=2E7=2Fengine.1
}

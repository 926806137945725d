package jetstream

import (
	"context"
	"crypto/rand"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// benchWorld is a world with a server on TCP, as for a shim on another host, with this interval of syncs.
func benchWorld(b *testing.B, sync time.Duration) *world {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	b.Cleanup(cancel)
	w := &world{t: b, ctx: ctx, dir: b.TempDir()}
	var err error
	w.srv, err = natsserver.Start(ctx, natsserver.Options{Dir: w.dir, Listen: "127.0.0.1:0", SyncInterval: sync})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(w.srv.Stop)
	w.c = connect(b, ConnOptions{URLs: []string{w.srv.URL()}})
	if w.ns, err = JoinNamespace(ctx, w.c, NamespaceConfig{Name: "test", Partitions: 1}); err != nil {
		b.Fatal(err)
	}
	if err := w.ns.EnsureStreams(ctx, LogConfig{MaxBytes: 8 << 30}); err != nil {
		b.Fatal(err)
	}
	return w
}

func payloads(n, size int) [][]byte {
	msgs := make([][]byte, n)
	for i := range msgs {
		msgs[i] = make([]byte, size)
		_, _ = rand.Read(msgs[i])
	}
	return msgs
}

// BenchmarkPublish measures the flush of a shim: a message, or a batch of messages, acknowledged. An operation is a
// message.
func BenchmarkPublish(b *testing.B) {
	for _, sync := range []time.Duration{0, 2 * time.Minute} {
		for _, batch := range []int{1, 16, 128, 1000} {
			for _, size := range []int{400, 4096} {
				name := fmt.Sprintf("sync=%v/batch=%d/%dB", sync, batch, size)
				if sync == 0 {
					name = fmt.Sprintf("sync=always/batch=%d/%dB", batch, size)
				}
				b.Run(name, func(b *testing.B) {
					w := benchWorld(b, sync)
					p := w.publisher(w1)
					msgs := payloads(batch, size)
					b.SetBytes(int64(size))
					b.ReportAllocs()
					b.ResetTimer()
					for n := 0; n < b.N; n += batch {
						if _, err := p.Publish(w.ctx, msgs[:min(batch, b.N-n)]); err != nil {
							b.Fatal(err)
						}
					}
					b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msgs/s")
				})
			}
		}
	}
}

// BenchmarkRead measures replay from the log. An operation is a message.
func BenchmarkRead(b *testing.B) {
	for _, size := range []int{200, 1024, 4096} {
		b.Run(fmt.Sprintf("%dB", size), func(b *testing.B) {
			w := benchWorld(b, 2*time.Minute)
			p := w.publisher(w1)
			const stored = 200_000
			msgs := payloads(1000, size)
			for range stored / len(msgs) {
				if _, err := p.Publish(w.ctx, msgs); err != nil {
					b.Fatal(err)
				}
			}
			b.SetBytes(int64(size))
			b.ReportAllocs()
			b.ResetTimer()
			for n := 0; n < b.N; {
				out := make(chan Update, 1)
				r, err := w.ns.StartReader(ReaderConfig{After: Position{Seq: events.StreamSeq(max(0, stored-(b.N-n)))},
					Deliver: to(out)})
				if err != nil {
					b.Fatal(err)
				}
				for caught := false; !caught; {
					u := <-out
					n += len(u.Messages)
					_, caught = u.Notice.(CaughtUp)
				}
				r.Stop()
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msgs/s")
		})
	}
}

// BenchmarkLatency measures the time from Publish to the reader's channel.
func BenchmarkLatency(b *testing.B) {
	w := benchWorld(b, 0)
	p := w.publisher(w1)
	out := make(chan Update)
	r, err := w.ns.StartReader(ReaderConfig{Deliver: to(out)})
	if err != nil {
		b.Fatal(err)
	}
	defer r.Stop()
	<-out // caught up
	msg := payloads(1, 400)
	b.ResetTimer()
	for range b.N {
		done := make(chan error, 1)
		go func() {
			_, err := p.Publish(w.ctx, msg)
			done <- err
		}()
		<-out
		if err := <-done; err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkCommit measures a snapshot of 32 chunks with its manifest. BenchmarkGet measures the read of a chunk.
func BenchmarkCommit(b *testing.B) {
	for _, atomic := range []bool{true, false} {
		b.Run(fmt.Sprintf("atomic=%v", atomic), func(b *testing.B) {
			w := benchWorld(b, 0)
			bucket := w.snapshots(atomic)
			var values []Value
			for i, data := range payloads(32, MaxValue) {
				values = append(values, Value{chunkKey(0, fmt.Sprint(i)), data})
			}
			b.SetBytes(32 * MaxValue)
			b.ResetTimer()
			var rev uint64
			for range b.N {
				var err error
				if rev, err = bucket.Commit(w.ctx, values, Value{manifestKey(0), []byte("m")}, rev); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkGet(b *testing.B) {
	w := benchWorld(b, 2*time.Minute)
	bucket := w.snapshots(true)
	if _, err := bucket.Put(w.ctx, chunkKey(0, "1"), payloads(1, MaxValue)[0]); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(MaxValue)
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		if _, err := bucket.Get(w.ctx, chunkKey(0, "1")); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkRequest(b *testing.B) {
	server, client := pair(b)
	serve(b, server, ServiceConfig{Endpoints: []Endpoint{{Name: "echo", Subject: "t.echo",
		Handler: func(_ context.Context, r Request) Response {
			return Response{ContentType: contentMsgpack, Body: r.Body}
		}}}})
	body := payloads(1, 1024)[0]
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		if _, err := client.Request(ctx, "t.echo", contentMsgpack, body); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkAccounts measures a bare request with 4 KB and a bare reply with 400 B, each with a header, for 32 callers
// over one connection: within an account, and across two. The difference is the cost of a service import.
func BenchmarkAccounts(b *testing.B) {
	const echo, caller = "users: [ { user: echo, password: p } ]", "users: [ { user: caller, password: p } ]"
	for _, c := range []struct{ name, accounts string }{
		{"one", "ONE { users: [ { user: echo, password: p }, { user: caller, password: p } ] }"},
		{"two", "ECHO { " + echo + ", exports: [ { service: t.echo } ] }\n" +
			"CALLER { " + caller + ", imports: [ { service: { account: ECHO, subject: t.echo } } ] }"},
	} {
		b.Run(c.name, func(b *testing.B) {
			srv := configServer(b, "accounts {\n"+c.accounts+"\n}\n")
			as := func(user string) *nats.Conn {
				return connect(b, ConnOptions{URLs: []string{srv.ClientURL()}, User: user, Password: "p", Core: true}).NATS()
			}
			server, client := as("echo"), as("caller")
			asked, answered := payloads(1, 4096)[0], payloads(1, 400)[0]
			message := func(subject string, body []byte) *nats.Msg {
				return &nats.Msg{Subject: subject, Data: body, Header: nats.Header{rpc.HeaderContentType: {contentMsgpack}}}
			}
			if _, err := server.Subscribe("t.echo", func(m *nats.Msg) {
				_ = m.RespondMsg(message(m.Reply, answered))
			}); err != nil {
				b.Fatal(err)
			}
			if err := server.Flush(); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			b.SetParallelism(32 / runtime.GOMAXPROCS(0))
			b.ResetTimer()
			b.RunParallel(func(p *testing.PB) {
				for p.Next() {
					if _, err := client.RequestMsg(message("t.echo", asked), time.Minute); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}

func BenchmarkEscapeToken(b *testing.B) {
	for _, name := range []string{"worker-12", "meta-llama/Llama-3.1-8B"} {
		b.Run(name[:6], func(b *testing.B) {
			b.ReportAllocs()
			for range b.N {
				if _, err := EscapeToken(name); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

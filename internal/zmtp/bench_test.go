package zmtp

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"testing"
	"time"
)

// forever is a stream that repeats itself.
type forever struct {
	b  []byte
	at int
}

func (f *forever) Read(p []byte) (int, error) {
	n := copy(p, f.b[f.at:])
	f.at = (f.at + n) % len(f.b)
	return n, nil
}

var payloadSizes = []int{200, 4 << 10, 64 << 10}

// Reading alone, from memory: three frames as an engine sends them.
func BenchmarkReader(b *testing.B) {
	for _, size := range payloadSizes {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			wire := encode([][]byte{[]byte("kv@pod@model"), make([]byte, 8), make([]byte, size)})
			r := &reader{r: bufio.NewReaderSize(&forever{b: bytes.Repeat(wire, 100)}, 64<<10), maxBytes: 1 << 20,
				maxFrames: 10}
			b.SetBytes(int64(len(wire)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := r.read(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// From our Pub through loopback to Recv; allocations are those of both sides.
func BenchmarkSubFromPub(b *testing.B) {
	for _, size := range payloadSizes {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			p := mustPub(b, "tcp://127.0.0.1:0", Config{SendQueue: 1 << 20, Heartbeat: -1})
			s := mustSub(b, p.Addr(), Config{}, "")
			next(b, s, Opened)
			if err := p.WaitSubscribers(within(b), 1); err != nil {
				b.Fatal(err)
			}
			topic, seq, payload := []byte("kv@pod@model"), make([]byte, 8), make([]byte, size)
			ctx := context.Background()
			taken := make(chan error, 1)
			tokens := make(chan struct{}, 1024) // in flight at most: far from both bounds of the queue
			n := b.N
			b.SetBytes(int64(size))
			b.ReportAllocs()
			b.ResetTimer()
			go func() {
				for range n {
					if _, err := s.Recv(ctx); err != nil {
						taken <- err
						return
					}
					<-tokens
				}
				taken <- nil
			}()
			for range n {
				tokens <- struct{}{}
				if err := p.Send(topic, seq, payload); err != nil {
					b.Fatal(err)
				}
			}
			if err := <-taken; err != nil {
				b.Fatal(err)
			}
		})
	}
}

// What is left of a Recv when the sender costs nothing: one goroutine of this process writes prepared bytes to a
// socket.
func BenchmarkSubFromRawSender(b *testing.B) {
	for _, size := range payloadSizes {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			endpoint, accept := rawServer(b)
			s := mustSub(b, endpoint, Config{}, "")
			p := shakeRaw(b, accept(), 1, "PUB")
			if err := p.nc.SetDeadline(time.Time{}); err != nil {
				b.Fatal(err)
			}
			go io.Copy(io.Discard, p.nc)
			next(b, s, Opened)
			wire := encode([][]byte{[]byte("kv@pod@model"), make([]byte, 8), make([]byte, size)})
			chunk := bytes.Repeat(wire, 1+(256<<10)/len(wire))
			go func() {
				for {
					if _, err := p.nc.Write(chunk); err != nil {
						return
					}
				}
			}()
			ctx := context.Background()
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.Recv(ctx); err != nil {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			p.nc.Close()
		})
	}
}

// One message to many subscribers that read nothing: what publishing itself costs, drops included.
func BenchmarkPubSend(b *testing.B) {
	for _, subscribers := range []int{0, 1, 16} {
		b.Run(fmt.Sprint(subscribers), func(b *testing.B) {
			p := mustPub(b, "tcp://127.0.0.1:0", Config{Heartbeat: -1})
			for range subscribers {
				dialRaw(b, p.Addr(), 1, "SUB").write(appendCommand(nil, "SUBSCRIBE", nil))
			}
			if err := p.WaitSubscribers(within(b), subscribers); err != nil {
				b.Fatal(err)
			}
			topic, seq, payload := []byte("kv@pod@model"), make([]byte, 8), make([]byte, 200)
			b.ReportAllocs()
			for b.Loop() {
				if err := p.Send(topic, seq, payload); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

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

// forever is a stream that repeats its bytes.
type forever struct {
	b  []byte
	at int
}

func (f *forever) Read(p []byte) (int, error) {
	n := copy(p, f.b[f.at:])
	f.at = (f.at + n) % len(f.b)
	return n, nil
}

// BenchmarkReader measures the reader alone, from memory: three frames as an engine sends them.
func BenchmarkReader(b *testing.B) {
	for _, size := range PayloadSizes {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			wire := Encode([][]byte{[]byte("kv@pod@model"), make([]byte, 8), make([]byte, size)})
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

// BenchmarkSubFromRawSender measures Recv with a cheap sender: one goroutine writes prepared bytes to a socket.
func BenchmarkSubFromRawSender(b *testing.B) {
	for _, size := range PayloadSizes {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			endpoint, accept := rawServer(b)
			s := MustSub(b, endpoint, Config{}, "")
			p := shakeRaw(b, accept(), 1, "PUB")
			if err := p.NC.SetDeadline(time.Time{}); err != nil {
				b.Fatal(err)
			}
			go io.Copy(io.Discard, p.NC)
			Next(b, s, Opened)
			wire := Encode([][]byte{[]byte("kv@pod@model"), make([]byte, 8), make([]byte, size)})
			chunk := bytes.Repeat(wire, 1+(256<<10)/len(wire))
			go func() {
				for {
					if _, err := p.NC.Write(chunk); err != nil {
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
			p.NC.Close()
		})
	}
}

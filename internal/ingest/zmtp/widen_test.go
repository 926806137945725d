package zmtp

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"testing"
	"time"
)

// TestWiden: a connection on which much comes at once gets the large buffer in the middle of the data, and loses none.
func TestWiden(t *testing.T) {
	near, far := net.Pipe()
	defer near.Close()
	c := &Conn{nc: near}
	c.in = reader{r: bufio.NewReaderSize(timedReader{c}, smallBuffer), maxBytes: 1 << 20, maxFrames: 10}
	message := func(i int) []byte { return fmt.Append(bytes.Repeat([]byte{'x'}, i%300), i) }
	const messages = 2000
	go func() {
		defer far.Close()
		var wire []byte
		for i := range messages {
			wire = append(wire, Encode([][]byte{message(i)})...)
		}
		_, _ = far.Write(wire) // the other side compares
	}()
	for i := range messages {
		if i == messages/3 {
			c.fills = busyFills
		}
		c.widen()
		it, err := c.in.read()
		if err != nil || len(it.frames) != 1 || !bytes.Equal(it.frames[0], message(i)) {
			t.Fatalf("message %d is %q, %v", i, it.frames, err)
		}
	}
	if c.in.r.Size() != largeBuffer {
		t.Errorf("the buffer has %d bytes", c.in.r.Size())
	}
}

// TestFilled: fills of the small buffer count if they follow quickly.
func TestFilled(t *testing.T) {
	c, now := &Conn{}, time.Now()
	for range 3 * busyFills {
		c.filled(now)
		now = now.Add(busyTime / 4)
	}
	if c.fills >= busyFills {
		t.Errorf("%d slow fills are counted", c.fills)
	}
	for range 2 * busyFills {
		c.filled(now)
	}
	if c.fills < busyFills {
		t.Errorf("%d quick fills are counted", c.fills)
	}
}

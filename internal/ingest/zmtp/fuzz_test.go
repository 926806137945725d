package zmtp

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"strings"
	"testing"

	"testing/iotest"
)

// naiveRead is the naive twin of the reader. It has all bytes in memory and does not handle streams. It returns the
// complete items. broken reports that the remaining bytes violate the protocol, instead of being incomplete.
func naiveRead(b []byte, maxBytes, maxFrames int) (items []item, broken bool) {
	var parts [][]byte
	total := 0
	for len(b) > 0 {
		flags := b[0]
		if flags > 7 {
			return items, true
		}
		b = b[1:]
		var size uint64
		if flags&flagLong != 0 {
			if len(b) < 8 {
				return items, false
			}
			size, b = binary.BigEndian.Uint64(b), b[8:]
		} else {
			if len(b) < 1 {
				return items, false
			}
			size, b = uint64(b[0]), b[1:]
		}
		if flags&flagCommand != 0 {
			if flags&flagMore != 0 || size > maxCommand {
				return items, true
			}
			if uint64(len(b)) < size {
				return items, false
			}
			body := b[:size]
			b = b[size:]
			if size == 0 || body[0] == 0 || int(body[0]) >= len(body) {
				return items, true
			}
			n := 1 + int(body[0])
			items = append(items, item{name: string(body[1:n]), data: body[n:]})
			continue
		}
		if size > uint64(maxBytes-total) || len(parts) == maxFrames {
			return items, true
		}
		if uint64(len(b)) < size {
			return items, false
		}
		parts = append(parts, b[:size])
		total += int(size)
		b = b[size:]
		if flags&flagMore == 0 {
			items = append(items, item{frames: parts})
			parts, total = nil, 0
		}
	}
	return items, false
}

func checkReader(t *testing.T, b []byte, stream io.Reader) {
	t.Helper()
	const maxBytes, maxFrames = 3000, 5
	want, broken := naiveRead(b, maxBytes, maxFrames)
	r := &reader{r: bufio.NewReaderSize(stream, 16), maxBytes: maxBytes, maxFrames: maxFrames}
	var got []item
	for {
		it, err := r.read()
		if err != nil {
			ended := err == io.EOF || err == io.ErrUnexpectedEOF
			if ended == broken || !ended && !errors.Is(err, ErrProtocol) {
				t.Fatalf("ended with %v, broken is %v", err, broken)
			}
			break
		}
		it.data = bytes.Clone(it.data) // valid until the next read
		got = append(got, it)
	}
	if len(got) != len(want) {
		t.Fatalf("%d items, want %d", len(got), len(want))
	}
	for i := range got {
		if got[i].name != want[i].name || !bytes.Equal(got[i].data, want[i].data) ||
			!Equal(got[i].frames, want[i].frames) {
			t.Fatalf("item %d: %q, want %q", i, got[i], want[i])
		}
	}
	if cap(r.head) > keepScratch+growStep || cap(r.cmd) > maxCommand+growStep {
		t.Fatalf("scratch memory of %d and %d bytes", cap(r.head), cap(r.cmd))
	}
}

func FuzzReader(f *testing.F) {
	for _, b := range [][]byte{
		Encode(Frames("topic", "12345678", strings.Repeat("x", 300))),
		Concat([]byte{1, 1, 'a'}, appendCommand(nil, "PING", []byte("\x00\x01ctx")), []byte{0, 0}),
		{2, 0, 0, 0, 0, 0, 0, 0, 1, 'x'},
		{2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff},
		{3, 0, 0, 0, 0, 0, 0, 0x0b, 0xb8},
		{4, 0}, {4, 1, 0}, {4, 1, 1}, {5, 2, 1, 'a'}, {8, 0}, {0}, {2, 0, 0},
		bytes.Repeat([]byte{1, 0}, 6),
	} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		checkReader(t, b, bytes.NewReader(b))
		checkReader(t, b, iotest.OneByteReader(bytes.NewReader(b)))
	})
}

// TestReaderAllocatesAsBytesArrive: a size that is announced but not sent allocates no memory.
func TestReaderAllocatesAsBytesArrive(t *testing.T) {
	head := binary.BigEndian.AppendUint64([]byte{flagLong}, 1<<40)
	for _, body := range []int{0, 10, growStep + 10} {
		r := &reader{r: bufio.NewReader(bytes.NewReader(append(head[:9:9], make([]byte, body)...))), maxBytes: 1 << 41,
			maxFrames: 1}
		if n := testing.AllocsPerRun(1, func() {
			if _, err := r.read(); err == nil {
				t.Error("a frame of a terabyte")
			}
		}); n > 10 {
			t.Errorf("%v allocations", n)
		}
	}
	big := bytes.Repeat([]byte("0123456789"), 1<<20)
	r := &reader{r: bufio.NewReader(bytes.NewReader(Encode([][]byte{big, big[:70000], big}))), maxBytes: 1 << 30,
		maxFrames: 3}
	it, err := r.read()
	if err != nil || !Equal(it.frames, [][]byte{big, big[:70000], big}) {
		t.Errorf("a big message: %d frames, %v", len(it.frames), err)
	}
	if r.head != nil {
		t.Errorf("%d bytes of scratch are kept after it", cap(r.head))
	}
}

// peerOf is a stream with all bytes of the other side.
type peerOf struct {
	io.Reader
	io.Writer
}

func FuzzHandshake(f *testing.F) {
	good := append(rawGreeting(1, "NULL"), rawReady("PUB")...)
	f.Add(good)
	f.Add(append(rawGreeting(0, "CURVE"), 0))
	f.Add([]byte("HTTP/1.1 200 OK\r\n\r\n"))
	f.Add(append(rawGreeting(1, "NULL"), appendCommand(nil, "ERROR", []byte("\x03bad"))...))
	f.Add(append(rawGreeting(1, "NULL"),
		appendCommand(nil, "READY", []byte("\x08Identity\x00\x00\x00\x01a\x0bsocket-type\x00\x00\x00\x03PUB"))...))
	f.Fuzz(func(t *testing.T, b []byte) {
		var p Peer
		r := &reader{r: bufio.NewReader(bytes.NewReader(b)), maxBytes: maxCommand, maxFrames: 10}
		err := handshake(peerOf{nil, io.Discard}, r, "SUB", nil, &p)
		if err == nil && p.SocketType != "PUB" && p.SocketType != "XPUB" {
			t.Fatalf("shook hands with a %q", p.SocketType)
		}
		if err != nil && !errors.Is(err, ErrRefused) && !errors.Is(err, ErrProtocol) &&
			!errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("an error without a class: %v", err)
		}
		if len(p.Identity) > 255 {
			t.Fatalf("identity of %d bytes", len(p.Identity))
		}
	})
}

package zmtp

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"slices"
)

// A frame on the wire (RFC 37, "Framing"):
//
//	+-------+------------------+----------------+
//	| flags | size: 1 octet,   | size octets    |
//	|       | or 8 (BE) if LONG|                |
//	+-------+------------------+----------------+
//
// A command is a frame with the COMMAND flag whose body is: length of the name (1 octet), the name, data.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4

	// maxCommand bounds a command's body. Subscriptions are the longest useful commands.
	maxCommand = 64 << 10

	// growStep is the memory allocated for a frame before its bytes arrive.
	growStep = 1 << 20

	// keepScratch bounds the scratch memory that a connection keeps between messages.
	keepScratch = 64 << 10
)

func appendFrame(dst []byte, flags byte, body []byte) []byte {
	dst = appendHeader(dst, flags, len(body))
	return append(dst, body...)
}

func appendHeader(dst []byte, flags byte, size int) []byte {
	if size > 255 {
		dst = append(dst, flags|flagLong)
		return binary.BigEndian.AppendUint64(dst, uint64(size))
	}
	return append(dst, flags, byte(size))
}

// Encode returns the wire form of one message.
func Encode(frames [][]byte) []byte {
	n := 0
	for _, f := range frames {
		n += len(f) + 9
	}
	dst := make([]byte, 0, n)
	for i, f := range frames {
		var flags byte
		if i < len(frames)-1 {
			flags = flagMore
		}
		dst = appendFrame(dst, flags, f)
	}
	return dst
}

func appendCommand(dst []byte, name string, data []byte) []byte {
	dst = appendHeader(dst, flagCommand, 1+len(name)+len(data))
	dst = append(dst, byte(len(name)))
	dst = append(dst, name...)
	return append(dst, data...)
}

// item is a parsed message, or a command if name is not empty.
type item struct {
	frames [][]byte // owned by the caller
	name   string   // a command
	data   []byte   // data of a command; valid until the next read
}

// reader splits a stream of bytes into messages and commands. Commands may arrive between the frames of a message:
// libzmq sends its heartbeats as soon as they are due.
type reader struct {
	r         *bufio.Reader
	maxBytes  int
	maxFrames int

	head []byte // all frames of the current message except the last
	ends []int  // end offset of each frame in head
	cmd  []byte // the last command's body
}

func (r *reader) read() (item, error) {
	for {
		flags, size, err := r.header()
		if err != nil {
			return item{}, err
		}
		if flags&flagCommand != 0 {
			return r.command(flags, size)
		}
		if size > uint64(r.maxBytes) || uint64(len(r.head))+size > uint64(r.maxBytes) {
			return item{}, fmt.Errorf("%w: message of more than %d bytes", ErrTooLarge, r.maxBytes)
		}
		if len(r.ends)+1 > r.maxFrames {
			return item{}, fmt.Errorf("%w: message of more than %d frames", ErrTooLarge, r.maxFrames)
		}
		if flags&flagMore != 0 {
			if r.head, err = appendFrom(r.head, r.r, int(size)); err != nil {
				return item{}, err
			}
			r.ends = append(r.ends, len(r.head))
			continue
		}
		frames, err := r.last(int(size))
		return item{frames: frames}, err
	}
}

// last reads the last frame of a message and assembles the message: one buffer, and one list of frames.
func (r *reader) last(size int) ([][]byte, error) {
	buf := make([]byte, len(r.head), len(r.head)+min(size, growStep))
	copy(buf, r.head)
	buf, err := appendFrom(buf, r.r, size)
	if err != nil {
		return nil, err
	}
	frames := make([][]byte, len(r.ends)+1)
	from := 0
	for i, end := range r.ends {
		frames[i] = buf[from:end:end]
		from = end
	}
	frames[len(r.ends)] = buf[from:]
	r.head, r.ends = r.head[:0], r.ends[:0]
	if cap(r.head) > keepScratch {
		r.head = nil
	}
	return frames, nil
}

func (r *reader) header() (flags byte, size uint64, err error) {
	flags, err = r.r.ReadByte()
	if err != nil {
		if err == io.EOF && len(r.ends) > 0 {
			err = io.ErrUnexpectedEOF
		}
		return 0, 0, err
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 {
		return 0, 0, fmt.Errorf("%w: frame flags %#02x", ErrProtocol, flags)
	}
	if flags&flagLong == 0 {
		b, err := r.r.ReadByte()
		return flags, uint64(b), unexpected(err)
	}
	b, err := r.r.Peek(8)
	if err != nil {
		return 0, 0, unexpected(err)
	}
	size = binary.BigEndian.Uint64(b)
	_, err = r.r.Discard(8)
	return flags, size, unexpected(err)
}

func (r *reader) command(flags byte, size uint64) (item, error) {
	if flags&flagMore != 0 {
		return item{}, fmt.Errorf("%w: a command that continues", ErrProtocol)
	}
	if size > maxCommand {
		return item{}, fmt.Errorf("%w: command of %d bytes", ErrTooLarge, size)
	}
	var err error
	if r.cmd, err = appendFrom(r.cmd[:0], r.r, int(size)); err != nil {
		return item{}, err
	}
	if size == 0 || r.cmd[0] == 0 || uint64(r.cmd[0]) >= size {
		return item{}, fmt.Errorf("%w: command without a name", ErrProtocol)
	}
	n := 1 + int(r.cmd[0])
	return item{name: string(r.cmd[1:n]), data: r.cmd[n:]}, nil
}

// appendFrom appends n bytes from r. It allocates memory as the bytes arrive: at most four times the bytes received.
// Growth copies the buffer, so the steps are large and few.
func appendFrom(dst []byte, r io.Reader, n int) ([]byte, error) {
	for n > 0 {
		if len(dst) == cap(dst) {
			dst = slices.Grow(dst, min(n, max(growStep, 3*len(dst))))
		}
		step := min(n, cap(dst)-len(dst))
		at := len(dst)
		dst = dst[:at+step]
		if _, err := io.ReadFull(r, dst[at:]); err != nil {
			return dst[:at], unexpected(err)
		}
		n -= step
	}
	return dst, nil
}

// unexpected converts io.EOF inside a frame to io.ErrUnexpectedEOF.
func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

package source

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

const maxLine = 16 << 20

// listen reads lines from all connections to a socket. The lines of one connection stay in order.
func (f *Source) listen(path string) error {
	l, err := zmtp.ListenUnix(f.ctx, path)
	if err != nil {
		return fmt.Errorf("--engine: %w", err)
	}
	var conns sync.WaitGroup
	defer conns.Wait()
	defer context.AfterFunc(f.ctx, func() { l.Close() })()
	for {
		c, err := l.Accept()
		if f.ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		conns.Go(func() {
			defer c.Close()
			if err := f.lines(c, path); err != nil {
				f.log.Warn("a connection has ended", "socket", path, "error", err)
			}
		})
	}
}

// lines reads lines until the end of the input. It counts and skips an invalid line.
func (f *Source) lines(from io.ReadCloser, name string) error {
	defer context.AfterFunc(f.ctx, func() { from.Close() })()
	in := bufio.NewReaderSize(from, 1<<20)
	var line []byte
	for number := 1; ; {
		part, err := in.ReadSlice('\n')
		if len(line) <= maxLine {
			line = append(line, part...)
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if text := bytes.TrimSpace(line); len(text) > 0 && f.ctx.Err() == nil {
			if f.line(text, name, number) {
				return nil
			}
		}
		number++
		if line = line[:0]; cap(line) > 1<<20 {
			line = nil
		}
		switch {
		case f.ctx.Err() != nil || errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("%s: %w", name, err)
		}
	}
}

// line delivers the events of a line, and reports whether the line is the last. --worker replaces a missing worker.
func (f *Source) line(text []byte, name string, number int) (last bool) {
	err := fmt.Errorf("longer than %d bytes", maxLine)
	if len(text) <= maxLine {
		last, err = events.ReadWorkerEvents(text, events.WorkerID(f.Worker),
			func(e events.RouterEvent, text []byte) error {
				f.deliver(e, events.PayloadDigest(text))
				return nil
			})
	}
	if err != nil {
		f.bad.WarnTo(f.log, "a line that is no router event; passed over", "from", name, "line", number, "error", err)
	}
	return last
}

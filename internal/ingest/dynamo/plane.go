package dynamo

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Envelope returns the envelope in a message of the event plane, for [events.ReadRouterEnvelope].
func Envelope(frames [][]byte) ([]byte, error) {
	if len(frames) != 4 {
		return nil, fmt.Errorf("a message of %d frames, not 4", len(frames))
	}
	last := frames[3]
	if len(last) < 5 || last[0] != 1 || uint64(binary.BigEndian.Uint32(last[1:])) != uint64(len(last)-5) {
		return nil, fmt.Errorf("the last frame of %d bytes begins with %x, not with 1 and its length", len(last),
			last[:min(len(last), 5)])
	}
	return last[5:], nil
}

// maxAnswer bounds the bytes of an answer.
const maxAnswer = 256 << 20

// maxHead bounds the bytes before the body.
const maxHead = 1 << 20

// ErrRefused: the worker refuses the request. The text contains the reason.
var ErrRefused = errors.New("the worker refuses")

// Ask requests a rank's events from its local indexer: the events since an id, or all blocks for 0. The rule restricts
// the address; nil permits every address.
func Ask(ctx context.Context, rule *dial.Rule, indexer string, key events.RankKey, from uint64) (a events.RouterAnswer,
	err error) {
	addr, path, ok := strings.Cut(indexer, "/")
	if !ok {
		return a, fmt.Errorf("%q is not HOST:PORT/PATH", indexer)
	}
	if _, _, err := dial.SplitHostPort(addr); err != nil {
		return a, err
	}
	worker, err := strconv.ParseUint(string(key.Instance), 10, 64)
	if err != nil {
		return a, fmt.Errorf("worker %q is not a number, as Dynamo's workers are", key.Instance)
	}
	conn, err := dial.Dialer{Rule: rule}.DialContext(ctx, "tcp", addr)
	if err != nil {
		return a, err
	}
	defer conn.Close()
	// The worker connects to the local address of this connection.
	local := conn.LocalAddr().(*net.TCPAddr)
	back, err := net.ListenTCP("tcp", &net.TCPAddr{IP: local.IP, Zone: local.Zone})
	if err != nil {
		return a, err
	}
	defer back.Close()
	defer context.AfterFunc(ctx, func() {
		conn.Close()
		back.Close()
	})()
	subject := rand.Text()
	request, err := appendRequest(nil, path, subject, back.Addr().String(), worker, key.Rank, from)
	if err != nil {
		return a, err
	}
	if _, err = conn.Write(request); err == nil {
		err = readAck(conn)
	}
	for err == nil {
		var called net.Conn
		if called, err = back.Accept(); err != nil {
			break
		}
		stop := context.AfterFunc(ctx, func() { called.Close() })
		var ours bool
		ours, a, err = readCall(called, subject)
		stop()
		called.Close()
		if ours {
			break
		}
		err = ctx.Err() // a stranger's connection costs only time
	}
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return a, err
}

// appendRequest appends a request to dst.
func appendRequest(dst []byte, path, subject, back string, worker uint64, rank events.Rank, from uint64) ([]byte,
	error) {
	type text = map[string]any
	info, err := json.Marshal(text{"address": back, "subject": subject, "context": subject, "stream_type": "response"})
	if err != nil {
		return nil, err
	}
	head, err := json.Marshal(text{"id": subject, "request_type": "single_in", "response_type": "many_out",
		"payload_codec": "msgpack", "connection_info": text{"transport": "tcp_server", "info": string(info)}})
	if err != nil {
		return nil, err
	}
	headers, err := json.Marshal(text{"request-id": subject, "x-endpoint-path": path})
	if err != nil {
		return nil, err
	}
	if len(path) > 1<<16-1 || len(headers) > 1<<16-1 {
		return nil, fmt.Errorf("a path of %d bytes", len(path))
	}
	body := msgp.AppendMapHead(nil, 5)
	body = msgp.AppendUint(msgp.AppendStr(body, "worker_id"), worker)
	body = msgp.AppendUint(msgp.AppendStr(body, "dp_rank"), uint64(rank))
	body = msgp.AppendStr(body, "start_event_id")
	if from == 0 {
		body = msgp.AppendNil(body)
	} else {
		body = msgp.AppendUint(body, from)
	}
	body = msgp.AppendNil(msgp.AppendStr(body, "end_event_id"))
	body = msgp.AppendBool(msgp.AppendStr(body, "supports_tree_dump_failed"), true)

	dst = append(binary.BigEndian.AppendUint16(dst, uint16(len(path))), path...)
	dst = append(binary.BigEndian.AppendUint16(dst, uint16(len(headers))), headers...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(messageHead+len(head)+len(body)))
	return appendMessage(dst, head, body), nil
}

// messageHead is the size of the lengths and checksum before a message's two parts.
const messageHead = 24

func appendMessage(dst, head, body []byte) []byte {
	dst = binary.BigEndian.AppendUint64(dst, uint64(len(head)))
	dst = binary.BigEndian.AppendUint64(dst, uint64(len(body)))
	dst = binary.BigEndian.AppendUint64(dst, 0)
	return append(append(dst, head...), body...)
}

// readMessage reads a message with a body of at most the given size.
func readMessage(r io.Reader, most uint64) (head, body []byte, err error) {
	var lengths [messageHead]byte
	if _, err := io.ReadFull(r, lengths[:]); err != nil {
		return nil, nil, err
	}
	h, b := binary.BigEndian.Uint64(lengths[:]), binary.BigEndian.Uint64(lengths[8:])
	if h > maxHead || b > most {
		return nil, nil, fmt.Errorf("a message of %d and %d bytes: at most %d and %d", h, b, maxHead, most)
	}
	if head, err = readN(r, int(h)); err == nil {
		body, err = readN(r, int(b))
	}
	return head, body, err
}

// readN reads n bytes. It allocates memory only for bytes that arrive.
func readN(r io.Reader, n int) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, int64(n)))
	if err == nil && len(b) < n {
		err = io.ErrUnexpectedEOF
	}
	return b, err
}

// readAck reads the acknowledgement of a request.
func readAck(r io.Reader) error {
	var length [4]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return fmt.Errorf("the worker does not acknowledge: %w", err)
	}
	n := binary.BigEndian.Uint32(length[:])
	if n == 0 {
		return nil
	}
	message, err := readN(r, int(min(n, 300)))
	if err != nil {
		return err
	}
	return fmt.Errorf("%w: %s", ErrRefused, message)
}

// strangerPatience bounds the wait for the first message on an incoming connection.
const strangerPatience = 5 * time.Second

// readCall reads an incoming connection. ours reports whether the connection belongs to the request with the subject.
func readCall(conn net.Conn, subject string) (ours bool, a events.RouterAnswer, err error) {
	r := bufio.NewReader(conn)
	_ = conn.SetReadDeadline(time.Now().Add(strangerPatience)) // an error only makes the wait longer
	head, _, err := readMessage(r, 0)
	_ = conn.SetReadDeadline(time.Time{})
	var hello struct {
		Subject string `json:"subject"`
		Type    string `json:"stream_type"`
	}
	if err != nil || strictjson.Unmarshal(head, &hello) != nil || hello.Subject != subject || hello.Type != "response" {
		return false, a, err
	}
	if head, _, err = readMessage(r, 0); err != nil {
		return true, a, fmt.Errorf("the worker's answer: %w", err)
	}
	var prologue struct {
		Error *string `json:"error"`
	}
	if err := strictjson.Unmarshal(head, &prologue); err != nil {
		return true, a, fmt.Errorf("the worker's answer begins with %.100q", head)
	}
	if prologue.Error != nil {
		return true, a, fmt.Errorf("%w: %.300s", ErrRefused, *prologue.Error)
	}
	_, body, err := readMessage(r, maxAnswer)
	if err != nil {
		return true, a, fmt.Errorf("the worker's answer: %w", err)
	}
	a, err = events.ReadRouterAnswer(body)
	return true, a, err
}

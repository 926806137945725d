package zmtp

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"regexp"
	"strings"
	"testing"
	"time"
)

// RawPeer sends raw bytes, for behaviour that no correct peer shows.
type RawPeer struct {
	t  testing.TB
	NC net.Conn
}

func rawGreeting(minor byte, mechanism string) []byte {
	g := greeting()
	g[11] = minor
	copy(g[mechanismFrom:mechanismTo], make([]byte, 20))
	copy(g[mechanismFrom:], mechanism)
	return g[:]
}

func rawReady(socketType string) []byte {
	return appendCommand(nil, "READY", appendProperty(nil, "Socket-Type", []byte(socketType)))
}

// DialRaw connects to a listening socket and performs the handshake.
func DialRaw(t testing.TB, endpoint string, minor byte, socketType string) *RawPeer {
	t.Helper()
	nc, err := net.Dial("tcp", strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	return shakeRaw(t, nc, minor, socketType)
}

func shakeRaw(t testing.TB, nc net.Conn, minor byte, socketType string) *RawPeer {
	t.Helper()
	t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(Patience))
	p := &RawPeer{t, nc}
	p.Write(append(rawGreeting(minor, "NULL"), rawReady(socketType)...))
	var g [greetingSize]byte
	if _, err := io.ReadFull(nc, g[:]); err != nil {
		t.Fatal(err)
	}
	if g != greeting() {
		t.Fatalf("greeting % x", g)
	}
	p.readCommand("READY")
	return p
}

func (p *RawPeer) Write(b []byte) {
	p.t.Helper()
	if _, err := p.NC.Write(b); err != nil {
		p.t.Fatal(err)
	}
}

func (p *RawPeer) Expect(want []byte) {
	p.t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(p.NC, got); err != nil || !bytes.Equal(got, want) {
		p.t.Fatalf("got %q %v, want %q", got, err, want)
	}
}

// readCommand reads a short command and returns its data.
func (p *RawPeer) readCommand(name string) []byte {
	p.t.Helper()
	var h [2]byte
	if _, err := io.ReadFull(p.NC, h[:]); err != nil {
		p.t.Fatal(err)
	}
	body := make([]byte, h[1])
	if _, err := io.ReadFull(p.NC, body); err != nil {
		p.t.Fatal(err)
	}
	if h[0] != flagCommand || int(body[0]) != len(name) || string(body[1:1+len(name)]) != name {
		p.t.Fatalf("got % x %q, want command %s", h, body, name)
	}
	return body[1+len(name):]
}

// rawServer accepts connections from dialling sockets.
func rawServer(t testing.TB) (endpoint string, accept func() net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return "tcp://" + ln.Addr().String(), func() net.Conn {
		t.Helper()
		ln.(*net.TCPListener).SetDeadline(time.Now().Add(Patience))
		nc, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { nc.Close() })
		return nc
	}
}

// TestHandshakeRefusals: wrong handshakes and the resulting errors.
func TestHandshakeRefusals(t *testing.T) {
	curve := rawGreeting(1, "CURVE")
	old := rawGreeting(0, "NULL")
	old[10] = 1
	for _, tc := range []struct {
		name      string
		say       []byte
		hangUp    bool
		is        error
		mechanism string
		text      string
	}{
		{name: "curve", say: curve, is: ErrRefused, mechanism: "CURVE", text: `"CURVE"`},
		{name: "plain", say: rawGreeting(0, "PLAIN"), is: ErrRefused, mechanism: "PLAIN", text: `"PLAIN"`},
		{name: "http", say: []byte("HTTP/1.1 400 Bad Request\r\n\r\n"), is: ErrRefused, text: "speaks HTTP, not"},
		{name: "short", say: []byte("-ERR\r\n"), hangUp: true, is: ErrRefused, text: "does not speak"},
		{name: "zmtp 2", say: old[:12], is: ErrRefused, text: "ZMTP 2"},
		{name: "zmtp 1", say: []byte{1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0}, is: ErrRefused, text: "does not speak"},
		{name: "mute", is: ErrSilent, text: "handshake"},
		{name: "mute after the greeting", say: rawGreeting(1, "NULL"), is: ErrSilent},
		{name: "hangs up", hangUp: true, is: io.ErrUnexpectedEOF, text: "another mechanism"},
		{name: "hangs up after the greeting", say: rawGreeting(1, "NULL"), hangUp: true, is: io.ErrUnexpectedEOF},
		{name: "wrong socket", say: append(rawGreeting(1, "NULL"), rawReady("REP")...), is: ErrRefused, text: `"REP"`},
		{name: "error", say: append(rawGreeting(1, "NULL"), appendCommand(nil, "ERROR", []byte("\x04nope"))...),
			is: ErrRefused, text: "refused the handshake"},
		{name: "error without a reason", say: append(rawGreeting(1, "NULL"), appendCommand(nil, "ERROR", []byte{9})...),
			is: ErrRefused},
		{name: "secret mechanism", say: rawGreeting(0, "nope"), is: ErrRefused, mechanism: "unknown", text: "unknown"},
		{name: "secret socket", say: append(rawGreeting(1, "NULL"), rawReady("nope")...), is: ErrRefused, text: "unknown"},
		{name: "secret command", say: append(rawGreeting(1, "NULL"), appendCommand(nil, "nope", nil)...), is: ErrProtocol},
		{name: "secret banner", say: []byte("SSH-2.0-nope_9.9\r\n"), is: ErrRefused, text: "does not speak"},
		{name: "message first", say: append(rawGreeting(1, "NULL"), 0, 1, 'x'), is: ErrProtocol},
		{name: "other command first", say: append(rawGreeting(1, "NULL"), appendCommand(nil, "HELLO", nil)...),
			is: ErrProtocol},
		{name: "broken properties", say: append(rawGreeting(1, "NULL"),
			appendCommand(nil, "READY", []byte("\x0bSocket-Type\xff\xff\xff\xff"))...), is: ErrProtocol},
		{name: "cut properties", say: append(rawGreeting(1, "NULL"),
			appendCommand(nil, "READY", []byte("\x0bSock"))...), is: ErrProtocol},
		{name: "huge command", say: append(rawGreeting(1, "NULL"), 6, 0, 0, 0, 0, 1, 0, 0, 0), is: ErrTooLarge},
		{name: "huge message", say: append(rawGreeting(1, "NULL"), 2, 0xff, 0, 0, 0, 0, 0, 0, 0), is: ErrTooLarge},
		{name: "nameless command", say: append(rawGreeting(1, "NULL"), 4, 1, 0), is: ErrProtocol},
		{name: "reserved flags", say: append(rawGreeting(1, "NULL"), 0x80, 0), is: ErrProtocol},
		{name: "endless command", say: append(rawGreeting(1, "NULL"), 5, 0), is: ErrProtocol},
	} {
		t.Run(tc.name, func(t *testing.T) {
			endpoint, accept := rawServer(t)
			failed := make(chan error, 100)
			cfg := Quick()
			if tc.is == ErrSilent {
				cfg.HandshakeTimeout = 100 * time.Millisecond
			}
			cfg.Failed = func(_ Peer, err error) {
				select {
				case failed <- err:
				default:
				}
			}
			s := MustSub(t, endpoint, cfg, "")
			for range 2 { // the socket dials again, with the same result
				nc := accept()
				if _, err := nc.Write(tc.say); err != nil {
					t.Fatal(err)
				}
				if tc.hangUp {
					nc.(*net.TCPConn).CloseWrite()
				}
				err := <-failed
				if regexp.MustCompile("nope|ERR|400|SSH").MatchString(err.Error()) {
					t.Errorf("the error contains text from the peer: %v", err)
				}
				if !errors.Is(err, tc.is) || !strings.Contains(err.Error(), tc.text) {
					t.Errorf("%v, want an error of %q with the text %q", err, tc.is, tc.text)
				}
				var refused *RefusedError
				if errors.As(err, &refused) != (tc.is == ErrRefused) || refused != nil &&
					refused.Mechanism != tc.mechanism {
					t.Errorf("%#v, want mechanism %q", refused, tc.mechanism)
				}
				nc.Close()
			}
			if n := s.Queued(); n != 0 {
				t.Errorf("%d messages from a peer without a handshake", n)
			}
			dealing := Quick()
			dealing.HandshakeTimeout = cfg.HandshakeTimeout
			if tc.name != "wrong socket" {
				endpoint, accept := rawServer(t) // the socket may have dialled the other one again
				go func() {
					nc := accept()
					nc.Write(tc.say)
					if tc.hangUp {
						nc.(*net.TCPConn).CloseWrite()
					}
				}()
				s.Stop()
				if _, err := DialDealer(Within(t), endpoint, dealing); !errors.Is(err, tc.is) {
					t.Errorf("dealer: %v, want %v", err, tc.is)
				}
			}
		})
	}
}

// TestBrokenFramingEndsOneConnection: a violation of the protocol after the handshake ends only that connection. The
// next connection works.
func TestBrokenFramingEndsOneConnection(t *testing.T) {
	long := func(flags byte, size ...byte) []byte { return append([]byte{flags | flagLong}, size...) }
	for name, tc := range map[string]struct {
		say []byte
		is  error
	}{
		"reserved flags": {[]byte{8, 0}, ErrProtocol},
		"negative size":  {long(0, 0x80, 0, 0, 0, 0, 0, 0, 0), ErrTooLarge},
		"oversize frame": {long(0, 0, 0, 0, 0, 0, 1, 0, 1), ErrTooLarge},
		"oversize together": {append(append(long(1, 0, 0, 0, 0, 0, 0, 0x80, 0), make([]byte, 0x8000)...),
			long(0, 0, 0, 0, 0, 0, 0, 0x80, 1)...), ErrTooLarge},
		"endless message":      {bytes.Repeat([]byte{1, 0}, 100), ErrTooLarge},
		"command that goes on": {[]byte{5, 5, 4, 'P', 'I', 'N', 'G'}, ErrProtocol},
		"oversize command":     {long(4, 0, 0, 0, 0, 0, 1, 0, 1), ErrTooLarge},
		"empty command":        {[]byte{4, 0}, ErrProtocol},
		"bad ping":             {appendCommand(nil, "PING", []byte{1}), ErrProtocol},
		"long ping":            {appendCommand(nil, "PING", make([]byte, 40)), ErrProtocol},
		"error command":        {appendCommand(nil, "ERROR", []byte("\x02no")), ErrProtocol},
		"cut":                  {[]byte{0, 10, 'x'}, io.ErrUnexpectedEOF},
		"cut between frames":   {[]byte{1, 1, 'x'}, io.ErrUnexpectedEOF},
		"clean end":            {nil, io.EOF},
	} {
		t.Run(name, func(t *testing.T) {
			endpoint, accept := rawServer(t)
			cfg := Quick()
			cfg.MaxMessage = 0x10000
			s := MustSub(t, endpoint, cfg, "")
			for range 2 {
				p := shakeRaw(t, accept(), 1, "PUB")
				p.Expect(appendCommand(nil, "SUBSCRIBE", nil))
				p.Write(Concat(Encode(Frames("good", "one")), appendCommand(nil, "WHATEVER", []byte("unknown")),
					tc.say))
				p.NC.(*net.TCPConn).CloseWrite()
				Next(t, s, Opened)
				if m := Next(t, s, Data); !Equal(m.Frames, Frames("good", "one")) {
					t.Errorf("got %q", m.Frames)
				}
				if m := Next(t, s, Closed); !errors.Is(m.Err, tc.is) {
					t.Errorf("closed with %v, want %v", m.Err, tc.is)
				}
			}
		})
	}
}

func TestPingPong(t *testing.T) {
	endpoint, accept := rawServer(t)
	cfg := Quick()
	cfg.Heartbeat = 10 * time.Millisecond
	cfg.HeartbeatTimeout = Patience
	s := MustSub(t, endpoint, cfg, "")
	p := shakeRaw(t, accept(), 1, "PUB")
	p.Expect(appendCommand(nil, "SUBSCRIBE", nil))
	Next(t, s, Opened)
	if got := p.readCommand("PING"); !bytes.Equal(got, []byte{0, 0}) {
		t.Errorf("our PING: % x", got)
	}
	p.Write(Concat([]byte{1, 1, 'a'}, appendCommand(nil, "PING", []byte("\x00\x00context")),
		appendCommand(nil, "PONG", nil), []byte{0, 1, 'b'}))
	if m := Next(t, s, Data); !Equal(m.Frames, Frames("a", "b")) {
		t.Errorf("a message around a PING: %q", m.Frames)
	}
	r := &reader{r: bufio.NewReader(p.NC), maxBytes: 1 << 20, maxFrames: 10}
	for {
		it, err := r.read()
		if err != nil {
			t.Fatal(err)
		}
		if it.name == "PONG" {
			if string(it.data) != "context" {
				t.Errorf("PONG with %q", it.data)
			}
			break
		}
	}
}

// TestSilence: a silent peer is disconnected after our own timeout, or after the time to live of its last PING. A 3.0
// peer is neither pinged nor disconnected.
func TestSilence(t *testing.T) {
	for name, tc := range map[string]struct {
		minor   byte
		timeout time.Duration
		ping    []byte
		gone    bool
	}{
		"ours":   {minor: 1, timeout: 100 * time.Millisecond, gone: true},
		"theirs": {minor: 1, timeout: Patience, ping: []byte{0, 1}, gone: true},
		"3.0":    {minor: 0, timeout: 100 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			endpoint, accept := rawServer(t)
			cfg := Quick()
			cfg.Heartbeat, cfg.HeartbeatTimeout = 10*time.Millisecond, tc.timeout
			s := MustSub(t, endpoint, cfg, "")
			p := shakeRaw(t, accept(), tc.minor, "PUB")
			Next(t, s, Opened)
			if tc.ping != nil {
				p.Write(appendCommand(nil, "PING", tc.ping))
			}
			if tc.gone {
				if m := Next(t, s, Closed); !errors.Is(m.Err, ErrSilent) {
					t.Errorf("closed with %v", m.Err)
				}
				return
			}
			p.Expect(appendFrame(nil, 0, []byte{1}))
			p.NC.SetReadDeadline(time.Now().Add(5 * tc.timeout))
			if n, err := p.NC.Read(make([]byte, 1)); n > 0 || !isTimeout(err) {
				t.Errorf("a 3.0 peer got %d bytes, %v", n, err)
			}
			p.Write(Encode(Frames("still", "here")))
			Next(t, s, Data)
		})
	}
}

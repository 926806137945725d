package zmtp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// The greeting (RFC 37, "Greeting"), 64 octets:
//
//	0         1..8      9     10      11      12..31                32         33..63
//	+------+---------+------+-------+-------+---------------------+-----------+--------+
//	| 0xFF | padding | 0x7F | major | minor | mechanism, 0-padded | as-server | filler |
//	+------+---------+------+-------+-------+---------------------+-----------+--------+
//
// A peer with an older major version waits for the first 11 octets before it sends more, so greet checks those first.
const (
	greetingSize  = 64
	versionSize   = 11
	mechanismFrom = 12
	mechanismTo   = 32
)

func greeting() [greetingSize]byte {
	var g [greetingSize]byte
	g[0], g[8], g[9] = 0xFF, 1, 0x7F // the padding of libzmq
	g[10], g[11] = 3, 1
	copy(g[mechanismFrom:], "NULL")
	return g
}

// peersOf lists the compatible peers of each socket type (RFC 28).
var peersOf = map[string][]string{
	"SUB":    {"PUB", "XPUB"},
	"PUB":    {"SUB", "XSUB"},
	"DEALER": {"ROUTER", "DEALER", "REP"},
	"ROUTER": {"DEALER", "REQ", "ROUTER"},
}

// socketTypes and mechanisms are the only names of a peer that errors repeat. Errors reach clients, and a client may
// have chosen the peer, so errors contain no other text from the peer.
var (
	socketTypes = []string{"PUB", "XPUB", "SUB", "XSUB", "REQ", "REP", "DEALER", "ROUTER", "PAIR", "PUSH", "PULL"}
	mechanisms  = []string{"PLAIN", "CURVE", "GSSAPI"}
)

// handshake exchanges greeting and READY. It fills in p with the peer's properties, even if it fails.
func handshake(rw io.ReadWriter, r *reader, socketType string, identity []byte, p *Peer) error {
	if err := greet(rw, r.r, p); err != nil {
		return err
	}
	if _, err := rw.Write(ready(socketType, identity)); err != nil {
		return fmt.Errorf("send READY: %w", err)
	}
	it, err := r.read()
	if err != nil {
		return fmt.Errorf("wait for READY: %w", unexpected(err))
	}
	switch it.name {
	case "READY":
	case "ERROR":
		return &RefusedError{Reason: "the peer refused the handshake"}
	case "":
		return fmt.Errorf("%w: a message before READY", ErrProtocol)
	default:
		return fmt.Errorf("%w: another command before READY", ErrProtocol)
	}
	if err := readReady(it.data, p); err != nil {
		return err
	}
	if slices.Contains(peersOf[socketType], p.SocketType) {
		return nil
	}
	kind := "socket of an unknown kind"
	if slices.Contains(socketTypes, p.SocketType) {
		kind = fmt.Sprintf("%q socket", p.SocketType)
	}
	return &RefusedError{Reason: fmt.Sprintf("the peer is a %s, a %s needs one of %s", kind, socketType,
		strings.Join(peersOf[socketType], ", "))}
}

// greet exchanges greetings in two steps. libzmq sends the second part of its greeting after our version, and closes
// the connection after an unsupported mechanism. If our whole greeting were sent at once, libzmq would close before it
// sent its mechanism's name.
func greet(w io.Writer, r io.Reader, p *Peer) error {
	ours := greeting()
	if _, err := w.Write(ours[:versionSize]); err != nil {
		return fmt.Errorf("send greeting: %w", err)
	}
	var g [greetingSize]byte
	if n, err := io.ReadFull(r, g[:versionSize]); err != nil {
		if n > 0 && g[0] != 0xFF {
			return notZMTP(g[:n])
		}
		return fmt.Errorf("wait for the greeting: %w", unexpected(err))
	}
	if g[0] != 0xFF || g[9]&1 == 0 {
		return notZMTP(g[:versionSize])
	}
	if g[10] < 3 {
		return &RefusedError{Reason: fmt.Sprintf(
			"the peer speaks ZMTP 2 (revision %d), which has no mechanisms; 3.0 or later is needed", g[10])}
	}
	_, sendErr := w.Write(ours[versionSize:]) // the peer's own words before it closed are the better reason
	if _, err := io.ReadFull(r, g[versionSize:]); err != nil {
		if sendErr != nil {
			err = sendErr
		}
		return fmt.Errorf("wait for the greeting: %w", unexpected(err))
	}
	if g[10] == 3 {
		p.Minor = g[11]
	} else {
		p.Minor = 1 // a later major version uses our version with us
	}
	name, _, _ := bytes.Cut(g[mechanismFrom:mechanismTo], []byte{0})
	if mechanism := string(name); mechanism != "NULL" {
		if !slices.Contains(mechanisms, mechanism) {
			mechanism = "unknown"
		}
		return &RefusedError{Mechanism: mechanism,
			Reason: fmt.Sprintf("the peer demands the security mechanism %q, only NULL is supported", mechanism)}
	}
	return nil
}

func notZMTP(b []byte) error {
	for _, of := range []struct{ sign, protocol string }{{"HTTP/", "HTTP"}, {"INFO ", "NATS"}, {"\x15\x03", "TLS"}} {
		if bytes.HasPrefix(b, []byte(of.sign)) {
			return &RefusedError{Protocol: of.protocol, Reason: "the peer speaks " + of.protocol + ", not ZMTP 3"}
		}
	}
	return &RefusedError{Reason: "the peer does not speak ZMTP 3"}
}

// ready returns a READY command with our properties. A property is the length of its name (1 octet), the name, the
// length of its value (4 octets, BE), and the value.
func ready(socketType string, identity []byte) []byte {
	data := appendProperty(nil, "Socket-Type", []byte(socketType))
	if socketType == "DEALER" {
		data = appendProperty(data, "Identity", identity)
	}
	return appendCommand(nil, "READY", data)
}

func appendProperty(dst []byte, name string, value []byte) []byte {
	dst = append(dst, byte(len(name)))
	dst = append(dst, name...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(value)))
	return append(dst, value...)
}

var errBadReady = fmt.Errorf("%w: READY with broken properties", ErrProtocol)

func readReady(data []byte, p *Peer) error {
	for len(data) > 0 {
		n := int(data[0])
		if n == 0 || len(data) < 1+n+4 {
			return errBadReady
		}
		name := string(data[1 : 1+n])
		size := binary.BigEndian.Uint32(data[1+n:])
		data = data[1+n+4:]
		if uint64(size) > uint64(len(data)) {
			return errBadReady
		}
		value := data[:size]
		data = data[size:]
		switch strings.ToLower(name) { // names are case-insensitive
		case "socket-type":
			p.SocketType = string(value)
		case "identity":
			if len(value) > 255 || len(value) > 0 && value[0] == 0 {
				return fmt.Errorf("%w: a malformed identity", ErrProtocol)
			}
			p.Identity = string(value)
		}
	}
	return nil
}

// shakeError explains a failed handshake. A peer that closes the connection during the handshake most likely requires
// another mechanism: libzmq behaves so.
func shakeError(err error) error {
	switch {
	case isTimeout(err):
		return fmt.Errorf("handshake: %w", ErrSilent)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("handshake: the peer closed the connection (it may demand another mechanism): %w", err)
	}
	return fmt.Errorf("handshake: %w", err)
}

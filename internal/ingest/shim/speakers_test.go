package shim

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestSpeakers plays the input of a listening socket: open, close and speak name a connection by number, and speak has
// a topic. The arrow precedes the treatment of a message, or whether the earlier blocks belong to another engine.
func TestSpeakers(t *testing.T) {
	for name, script := range map[string]string{
		"one engine":                      "open 1; speak 1 a > follow; speak 1 a > follow",
		"it dials again":                  "open 1; speak 1 a > follow; close 1; open 2; speak 2 a > follow",
		"another topic dials in after it": "open 1; speak 1 a > follow; close 1; open 2; speak 2 b > replace",
		"a second engine, plain topics":   "open 1; speak 1 a > follow; open 2; speak 2 a > replace; speak 1 a > skip; speak 2 a > follow",
		"a second topic":                  "open 1; speak 1 a > follow; open 2; speak 2 b > skip; speak 1 a > follow",
		"two topics over one connection":  "open 1; speak 1 a > follow; speak 1 b > skip; speak 1 a > follow",
		"the followed one ends, others speak": "open 1; open 2; speak 2 a > follow; speak 1 b > skip; close 2 > replaced; " +
			"speak 1 b > follow; speak 1 b > follow",
		"the followed one ends, the other was silent": "open 1; open 2; speak 2 a > follow; close 2; speak 1 a > replace",
		"three restarts on one connection": "open 1; speak 1 a > follow; restart > ok; restart > ok; restart > muted; " +
			"speak 1 a > skip; wait 61s; speak 1 a > replace; speak 1 a > follow",
		"restarts far apart": "open 1; speak 1 a > follow; restart > ok; restart > ok; wait 61s; restart > ok",
		"the mute ends without a message": "open 1; speak 1 a > follow; restart > ok; restart > ok; restart > muted; " +
			"tick > several; wait 61s; tick > replaced; tick; speak 1 a > follow",
		"a second topic ends": "open 1; speak 1 a > follow; speak 1 b > skip; tick > several; wait 301s; tick; speak 1 a > follow",
		"a new connection ends the mute": "open 1; speak 1 a > follow; restart > ok; restart > ok; restart > muted; close 1; " +
			"open 2; speak 2 a > follow",
	} {
		t.Run(name, func(t *testing.T) {
			var s speakers
			now := time.Unix(1000, 0)
			for _, line := range strings.Split(script, "; ") {
				command, want, _ := strings.Cut(line, " > ")
				var verb, topic string
				peer := zmtp.Peer{}
				fmt.Sscan(command, &verb, &peer.Conn, &topic)
				got := ""
				switch verb {
				case "open":
					s.opened(&peer)
				case "close":
					if s.closed(&peer) {
						got = "replaced"
					}
				case "speak":
					got = [...]string{"follow", "replace", "skip"}[s.message(&peer, []byte(topic), now)]
				case "restart":
					got = map[bool]string{true: "muted", false: "ok"}[s.restarted(now)]
				case "tick":
					if s.tick(now) {
						got = "replaced"
					} else if s.several() != "" {
						got = "several"
					}
				case "wait":
					d, err := time.ParseDuration(strings.Fields(command)[1])
					if err != nil {
						t.Fatal(err)
					}
					now = now.Add(d)
				}
				if got != want {
					t.Fatalf("%s: %q, want %q", command, got, want)
				}
			}
		})
	}
}

// TestSpeakersNeverMix plays random connections. Between two messages of different engines, the machine gets a
// replacement, and a state of several engines ends with the connections.
func TestSpeakersNeverMix(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 9))
	for range 2000 {
		var s speakers
		now := time.Unix(1000, 0)
		next, open := uint64(1), map[uint64]string{}
		var last uint64 // connection of the last received message; 0: unknown
		for range 60 {
			now = now.Add(time.Duration(rng.IntN(1000)) * time.Millisecond)
			conn := uint64(0)
			for c := range open {
				conn = c
			}
			switch rng.IntN(8) {
			case 0:
				open[next] = string(rune('a' + rng.IntN(2)))
				s.opened(&zmtp.Peer{Conn: next})
				next++
			case 1:
				if conn > 0 {
					delete(open, conn)
					if s.closed(&zmtp.Peer{Conn: conn}) {
						last = 0
					}
				}
			default:
				if conn == 0 {
					continue
				}
				switch s.message(&zmtp.Peer{Conn: conn}, []byte(open[conn]), now) {
				case follow:
					if _, both := open[last]; last != 0 && last != conn && both {
						t.Fatalf("connections %d and %d count as the same engine", last, conn)
					}
					last = conn
				case replace:
					last = conn
				}
			}
		}
		for c := range open {
			s.closed(&zmtp.Peer{Conn: c})
		}
		if text := s.several(); text != "" || len(s.open) > 0 {
			t.Fatalf("with no connection: %q, %d open", text, len(s.open))
		}
	}
}

// TestOthersAreBounded: a peer with ever new topics costs no more memory than a few speakers.
func TestOthersAreBounded(t *testing.T) {
	var s speakers
	now := time.Unix(1000, 0)
	p := &zmtp.Peer{Conn: 1, Remote: "10.0.0.1:1"}
	s.opened(p)
	s.message(p, []byte("kv"), now)
	for i := range 10_000 {
		s.message(p, fmt.Append(nil, i, "\n\x1b"), now)
	}
	if len(s.others) != othersMost || len(s.several()) > 1000 || strings.ContainsAny(s.several(), "\n\x1b") {
		t.Errorf("%d others: %q", len(s.others), s.several())
	}
	s.tick(now.Add(otherFor + time.Second))
	if s.several() != "" {
		t.Errorf("after a silence: %s", s.several())
	}
}

// inbox is an engine's live socket with the messages of a test.
type inbox struct {
	ready chan struct{}
	list  []zmtp.Message
}

func (in *inbox) Ready() <-chan struct{} { return in.ready }

func (in *inbox) TryRecv() (m zmtp.Message, ok bool, err error) {
	m, in.list = in.list[0], in.list[1:]
	return m, true, nil
}

// reports records the reports about several engines.
type reports struct {
	Unobserved
	mu   sync.Mutex
	list []string
}

func (r *reports) Several(fault string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = append(r.list, fault)
}

func (r *reports) all() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.list)
}

// TestMuteEndsInSilence: the report about a muted connection ends although the engine publishes nothing more. The next
// message counts.
func TestMuteEndsInSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		in, said, log := &inbox{ready: make(chan struct{})}, &reports{}, &keptLog{changed: make(chan struct{})}
		ended := make(chan error, 1)
		go func() {
			ended <- Run(ctx, Config{Listen: true, Messages: in, Identity: Identity{Model: "m", BlockSize: 16},
				Decoder: Whole{Decode: decodeWords},
				Log:     log, Observer: said})
		}()
		peer := &zmtp.Peer{Conn: 1}
		receive := func(m zmtp.Message) {
			synctest.Wait()
			m.Peer = peer
			in.list = append(in.list, m)
			in.ready <- struct{}{}
			synctest.Wait()
		}
		publish := func(seq events.EngineSeq) {
			receive(zmtp.Message{Kind: zmtp.Data, Frames: [][]byte{nil, binary.BigEndian.AppendUint64(nil, uint64(seq)),
				fmt.Appendf(nil, "life +%d", seq+1)}})
		}
		receive(zmtp.Message{Kind: zmtp.Opened})
		for seq := range events.EngineSeq(restartsMost + 1) {
			publish(restartsMost - seq) // each message but the first is a restart
		}
		if list := said.all(); len(list) != 1 || !strings.Contains(list[0], "over one connection") || len(log.held) != 0 {
			t.Errorf("muted: reports %q, blocks %v", list, log.held)
		}
		time.Sleep(mutedFor + time.Minute)
		synctest.Wait()
		if list := said.all(); len(list) != 2 || list[1] != "" {
			t.Errorf("after a silence: reports %q", list)
		}
		publish(9)
		if list := said.all(); len(list) != 2 || len(log.held) != 1 || log.held[0] != 10 {
			t.Errorf("after a message: reports %q, blocks %v", list, log.held)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

package shim

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// story drives a machine with lines of words, and records the results:
//
//	connected             the engine's socket is connected
//	live 3 life1 +7       message 3 arrives live; its payload is as in [engine.publish]
//	asks 3                a replay from message 3 on is due
//	asks nothing          no replay is due
//	replayed 3 life1 +7   message 3 arrives in a replay
//	ended                 the replay's end marker
//	failed                the replay fails, and is not repeated
//	again                 a shim starts again from the content of the log
type story struct {
	*testing.T
	m      *Machine
	replay bool
	now    events.Millis
	log    []string
	last   Published
}

func (w *story) start() {
	w.m = NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{ReplayTries: 1}, w.replay, Whole{Decode: decodeWords})
	w.m.Recovered(w.last, w.now)
}

func (w *story) step(line string) {
	w.Helper()
	w.now += 1000
	word, rest, _ := strings.Cut(line, " ")
	frame := func() (f Frame) {
		number, payload, _ := strings.Cut(rest, " ")
		if _, err := fmt.Sscan(number, &f.Seq); err != nil {
			w.Fatal(err)
		}
		f.Payload = []byte(payload)
		return f
	}
	switch word {
	case "connected":
		w.m.Connected()
	case "live":
		w.m.Live(frame(), w.now)
	case "asks":
		got := "nothing"
		if from, ok := wantsReplay(w.m); ok {
			got = fmt.Sprint(from)
		}
		if got != rest {
			w.Errorf("requests %s, want %s", got, rest)
		}
	case "replayed":
		w.m.Replayed(frame(), w.now)
	case "ended":
		w.m.ReplayEnded(w.now)
	case "failed":
		for w.m.ReplayFailed(w.now).Again {
			w.now += 10_000
			w.m.RetryReplay()
			wantsReplay(w.m)
		}
	case "again":
		w.start()
	default:
		w.Fatalf("no word %q", word)
	}
	for {
		flight, err := w.m.fly()
		if err != nil {
			w.Fatal(err)
		}
		if flight == nil {
			return
		}
		for _, data := range flight {
			w.write(data)
		}
		w.m.Flushed()
	}
}

// write adds a message of the log.
func (w *story) write(data []byte) {
	var b events.Batch
	if err := events.DecodeBatch(data, &b); err != nil {
		w.Fatal(err)
	}
	for _, e := range b.Events {
		switch e.Kind {
		case events.Stored:
			w.log = append(w.log, fmt.Sprintf("+%d", e.Blocks[0]))
		case events.Removed:
			w.log = append(w.log, fmt.Sprintf("-%d", e.Blocks[0]))
		case events.Cleared:
			w.log = append(w.log, "clear:"+e.Reason.String())
		}
	}
	w.last = Published{Found: true, Reached: Reached{b.Incarnation, b.LastID(), b.Cursor}}
}

// TestSequences checks the meaning of an engine's numbers, line by line. pkg/events/testdata/COVERAGE.md lists the
// statements.
func TestSequences(t *testing.T) {
	begin := []string{"connected", "asks 0", "replayed 0 life1 +1", "ended"}
	for _, c := range []struct {
		says     string
		noReplay bool
		steps    []string
		want     string // the log
	}{
		{"the first contact requests a full replay at once, without a gap", false,
			[]string{"connected", "asks 0", "replayed 0 life1 +1", "replayed 1 life1 +2", "ended",
				"live 2 life1 +3"}, "clear:restart +1 +2 +3"},
		{"the replay of a silent engine is only an end marker", false,
			[]string{"connected", "asks 0", "ended", "live 0 life1 +1"}, "clear:restart +1"},
		{"joined late, without a replay: messages count from there on", true,
			[]string{"connected", "asks nothing", "live 7 life1 +1", "live 8 life1 +2"}, "clear:restart +1 +2"},
		{"joined late, the replay buffer has moved on: likewise", false,
			[]string{"connected", "asks 0", "replayed 5 life1 +5", "ended", "live 6 life1 +6"}, "clear:restart +5 +6"},
		{"the next number: processed", false, append(begin[:4:4], "live 1 life1 +2"), "clear:restart +1 +2"},
		{"the same number and content again: dropped", false, append(begin[:4:4], "live 0 life1 +1", "asks nothing",
			"live 1 life1 +2"), "clear:restart +1 +2"},
		{"a later number: the gap is requested and filled", false,
			append(begin[:4:4], "live 3 life1 +4", "asks 0", "replayed 0 life1 +1", "replayed 1 life1 +2",
				"replayed 2 life1 +3", "replayed 3 life1 +4", "ended", "live 4 life1 +5"),
			"clear:restart +1 +2 +3 +4 +5"},
		{"live messages during a replay are held, and counted once", false,
			append(begin[:4:4], "live 2 life1 +3", "asks 0", "live 3 life1 +4", "replayed 0 life1 +1",
				"live 4 life1 +5", "replayed 1 life1 +2", "replayed 2 life1 +3", "replayed 3 life1 +4", "ended"),
			"clear:restart +1 +2 +3 +4 +5"},
		{"a gap, and a replay after the gap: the rank is cleared with the reason", false,
			append(begin[:4:4], "live 9 life1 +10", "asks 0", "replayed 8 life1 +9", "replayed 9 life1 +10",
				"ended"), "clear:restart +1 clear:gap +9 +10"},
		{"a number that is also missing in the replay: cleared", false,
			append(begin[:4:4], "live 2 life1 +3", "asks 0", "replayed 0 life1 +1", "replayed 2 life1 +3",
				"ended"), "clear:restart +1 clear:gap +3"},
		{"a gap without a replay: cleared", false, append(begin[:4:4], "live 2 life1 +3", "asks 0", "failed"),
			"clear:restart +1 clear:gap +3"},
		{"a gap, and there is no replay socket: cleared", true, []string{"connected", "live 0 life1 +1",
			"live 2 life1 +3"}, "clear:restart +1 clear:gap +3"},
		{"a lower number: a new life with a full replay", false,
			append(begin[:4:4], "live 1 life1 +2", "live 0 life2 +7", "asks 1", "ended", "asks 0",
				"replayed 0 life2 +7", "ended"), "clear:restart +1 +2 clear:restart +7"},
		{"a lower number without a replay socket: a new life", true, []string{"connected", "live 0 life1 +1",
			"live 1 life1 +2", "live 0 life2 +7"}, "clear:restart +1 +2 clear:restart +7"},
		{"the same number with another content: a new life", false,
			append(begin[:4:4], "live 0 life2 +7", "asks 0", "replayed 0 life2 +7", "asks 0", "replayed 0 life2 +7",
				"ended"), "clear:restart +1 clear:restart +7"},
		{"a new life that is ahead of the old life: the replayed message differs", false,
			append(begin[:4:4], "connected", "asks 0", "replayed 0 life2 +7", "asks 0", "replayed 0 life2 +7",
				"replayed 1 life2 +8", "ended"), "clear:restart +1 clear:restart +7 +8"},
		{"a new life with matching numbers after a reconnect: detected by the digest", false,
			append(begin[:4:4], "connected", "asks 0", "live 1 life2 +8", "replayed 0 life2 +7", "asks 0",
				"replayed 0 life2 +7", "replayed 1 life2 +8", "ended"), "clear:restart +1 clear:restart +7 +8"},
		{"a reconnect without a new life loses and repeats nothing", false,
			append(begin[:4:4], "connected", "asks 0", "replayed 0 life1 +1", "replayed 1 life1 +2", "ended",
				"live 2 life1 +3"), "clear:restart +1 +2 +3"},
		{"numbers from 1, as some simulators have", false, []string{"connected", "asks 0", "replayed 1 life1 +1",
			"ended", "live 2 life1 +2"}, "clear:restart +1 +2"},
		{"a restarted shim continues at the end of the log", false,
			append(begin[:4:4], "again", "connected", "asks 0", "replayed 0 life1 +1", "replayed 1 life1 +2",
				"ended"), "clear:restart +1 +2"},
		{"a restarted shim beside another life of the engine", false,
			append(begin[:4:4], "again", "connected", "asks 0", "replayed 0 life2 +7", "asks 0", "replayed 0 life2 +7",
				"ended"), "clear:restart +1 clear:restart +7"},
		{"a clear at any time, and the engine's first message", false,
			[]string{"connected", "asks 0", "replayed 0 life1 clear", "replayed 1 life1 +1 clear +2",
				"ended"}, "clear:restart clear:engine +1 clear:engine +2"},
		{"a removal of an unknown block goes into the log: the index counts it", false,
			append(begin[:4:4], "live 1 life1 -99"), "clear:restart +1 -99"},
		{"an undecodable message is skipped without other effects", false, append(begin[:4:4], "live 1 life1 +x",
			"live 2 life1 +3"), "clear:restart +1 +3"},
		{"silence is no death", false, append(begin[:4:4], "connected", "asks 0", "replayed 0 life1 +1", "ended",
			"connected", "asks 0", "replayed 0 life1 +1", "ended"), "clear:restart +1"},
	} {
		t.Run(c.says, func(t *testing.T) {
			w := &story{T: t, replay: !c.noReplay, now: 1000}
			w.start()
			for i, line := range c.steps {
				w.step(line)
				if t.Failed() {
					t.Fatalf("at step %d, %q", i, line)
				}
			}
			if want := strings.Fields(c.want); !slices.Equal(w.log, want) {
				t.Errorf("the log has %q, want %q", w.log, want)
			}
		})
	}
}

package affinity

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// hashesOf returns the sequence hashes of a prompt with a block for each letter.
func hashesOf(prompt string) []events.SeqHash {
	var locals []events.LocalHash
	for _, letter := range []byte(prompt) {
		locals = append(locals, events.LocalHash(letter))
	}
	return events.SeqHashes(nil, locals)
}

// TestPromptsAgainstTwin compares a machine with a list of prompts as texts.
func TestPromptsAgainstTwin(t *testing.T) {
	rng := rand.New(rand.NewPCG(*seed, 2))
	const ttl, most = 10 * time.Second, 20
	type twin struct {
		model, text string
		rank        events.RankKey // empty: no session
		ends        time.Duration
		live        string
	}
	var list []*twin
	alive := map[string]bool{}
	m := NewMachine(0, Config{Origin: 1, TTL: ttl, Prompts: most, Alive: func(_, id string) bool { return alive[id] }})
	m.Alone()
	now := time.Duration(0)
	counts := map[string]int{}
	of := func(model, text string) *twin {
		i := slices.IndexFunc(list, func(x *twin) bool { return x.model == model && x.text == text })
		if i < 0 {
			return nil
		}
		return list[i]
	}
	// continued is the longest prefix among the prompts of sessions.
	continued := func(model, text string) (longest *twin) {
		for _, x := range list {
			if x.model == model && len(x.text) < len(text) && strings.HasPrefix(text, x.text) &&
				(longest == nil || len(x.text) > len(longest.text)) {
				longest = x
			}
		}
		if longest != nil && longest.rank.Instance == "" {
			return nil
		}
		return longest
	}
	var past []string
	for step := range testkit.Rounds(30_000) {
		model := fmt.Sprint("m", rng.IntN(2))
		switch rng.IntN(4) {
		case 0: // wait
			for to := now + time.Duration(rng.Int64N(int64(time.Second))); now < to; {
				now = min(max(m.Wake(), now), to)
				m.Step(now)
			}
		case 1: // end a request
			if ids := slices.Sorted(maps.Keys(alive)); len(ids) > 0 {
				delete(alive, ids[rng.IntN(len(ids))])
			}
		default:
			text := []string{"", "S", "SY", "TOOLS"}[rng.IntN(4)] // common beginnings of many sessions
			if len(past) > 0 && rng.IntN(2) == 0 {
				text = past[len(past)-1-rng.IntN(min(len(past), 20))]
			}
			for range rng.IntN(3) {
				text += string(rune('a' + rng.IntN(6)))
			}
			past = append(past, text)
			where, id := rank(rng.IntN(6)), ""
			if rng.IntN(3) == 0 {
				id = fmt.Sprint("r", step)
				alive[id] = true
			}
			before := continued(model, text)
			got, follows := m.Follow(now, model, hashesOf(text))
			if follows != (before != nil) || follows && got != before.rank {
				t.Fatalf("step %d: %q goes to %v %v, want %+v", step, text, got, follows, before)
			}
			how, from, err := m.BindPrompt(now, model, hashesOf(text), where, id)
			own, want := of(model, text), How(0)
			switch {
			case text == "":
				counts["short"]++
			case err != nil:
				if counts["full"]++; !errors.Is(err, ErrFull) || own != nil || len(list) < most {
					t.Fatalf("step %d: %v with %d prompts", step, err, len(list))
				}
			case own != nil:
				counts["unclear"]++
				own.rank, own.ends, own.live = events.RankKey{}, now+ttl, ""
			case before == nil:
				want = Made
			case before.rank == where:
				want = Kept
			default:
				want = Moved
			}
			if counts[fmt.Sprint("how ", how)]++; how != want || before != nil && want > Made && from != before.rank {
				t.Fatalf("step %d: %q on %v: %v from %v, want %v from %+v", step, text, where, how, from, want, before)
			}
			if want > 0 {
				list = append(list, &twin{model, text, where, now + ttl, id})
			}
			if want > Made {
				before.rank, before.ends, before.live = events.RankKey{}, now+endedFor, ""
			}
		}
		list = slices.DeleteFunc(list, func(x *twin) bool {
			if alive[x.live] {
				x.ends = now + ttl
			}
			hashes := hashesOf(x.text)
			b := m.bindings[PromptKey(x.model, hashes[len(hashes)-1])]
			bound := b != nil && b.ends > now
			// A machine checks requests periodically.
			if now < x.ends && !bound || now > x.ends+m.usePeriod() && bound {
				t.Fatalf("step %d, %v: %+v is bound: %v", step, now, x, bound)
			}
			return !bound
		})
		if err := m.check(); err != nil {
			t.Fatalf("step %d: %v", step, err)
		}
	}
	t.Log(counts, m.Counts)
	for _, what := range []string{"unclear", "full", "short", "how 1", "how 2", "how 3"} {
		if counts[what] < testkit.Rounds(50) {
			t.Errorf("%s: %d times", what, counts[what])
		}
	}
}

// TestCommonPromptBindsNobody: prompts with a common beginning, and prompts equal to the common part, do not share
// bindings. Each user's next prompt goes to the worker of the last prompt.
func TestCommonPromptBindsNobody(t *testing.T) {
	m := NewMachine(0, Config{Origin: 1, TTL: time.Minute})
	common := strings.Repeat("s", 40)
	bind := func(text string, where events.RankKey) How {
		t.Helper()
		how, _, err := m.BindPrompt(0, "m", hashesOf(text), where, "")
		if err != nil {
			t.Fatal(err)
		}
		return how
	}
	wrong := 0
	for user := range 26 {
		first := common + strings.Repeat(string(rune('a'+user)), 3)
		if _, follows := m.Follow(0, "m", hashesOf(first)); follows {
			wrong++
		}
		if how := bind(first, rank(user)); how != Made && user != 1 {
			t.Errorf("user %d: %v", user, how)
		}
		bind(common, rank(user)) // a question that fills no block
	}
	if wrong > 1 { // after the first short question, before a second one
		t.Errorf("%d first prompts were sent to another's worker", wrong)
	}
	for user := range 26 {
		next := common + strings.Repeat(string(rune('a'+user)), 5)
		if got, follows := m.Follow(0, "m", hashesOf(next)); !follows || got != rank(user) {
			t.Errorf("user %d goes to %v %v", user, got, follows)
		}
		if how := bind(next, rank(user)); how != Kept {
			t.Errorf("user %d: %v", user, how)
		}
		if got, follows := m.Follow(0, "m", hashesOf(next[:43]+"fork")); follows {
			t.Errorf("user %d: a fork of the first prompt goes to %v", user, got)
		}
	}
	if _, follows := m.Follow(0, "other", hashesOf(common+"aaaaaaa")); follows {
		t.Error("a prompt for another model continues a session")
	}
}

// TestFullPromptsLeaveSessions: prompts without an id do not displace sessions with an id, and the reverse.
func TestFullPromptsLeaveSessions(t *testing.T) {
	m := NewMachine(0, Config{Origin: 1, TTL: time.Minute, Sessions: 2, Prompts: 3})
	for i := range 6 {
		_, _, full := m.BindPrompt(0, "m", hashesOf(strings.Repeat(string(rune('a'+i)), 2)), rank(0), "")
		_, _, refused := m.Bind(0, Key{"m", fmt.Sprint("s", i)}, rank(0), "", never)
		if errors.Is(full, ErrFull) != (i >= 3) || errors.Is(refused, ErrFull) != (i >= 2) {
			t.Errorf("%d: %v, %v", i, full, refused)
		}
	}
	if how, _, err := m.BindPrompt(0, "m", hashesOf("aab"), rank(1), ""); !errors.Is(err, ErrFull) {
		t.Errorf("with no room for the next prompt: %v %v", how, err)
	}
	if _, _, err := m.BindPrompt(2*time.Minute, "m", hashesOf("aab"), rank(1), ""); err != nil {
		t.Errorf("after the end of all: %v", err)
	}
}

// BenchmarkFollow finds the session of a prompt of 512 blocks among 65,536.
func BenchmarkFollow(b *testing.B) {
	m := NewMachine(0, Config{Origin: 1, TTL: time.Hour})
	hash := func(session, block int) events.SeqHash {
		return events.SeqHash(uint64(session+1)*0x9e3779b97f4a7c15 ^ uint64(block+1)*0xbf58476d1ce4e5b9)
	}
	for s := range 65_536 {
		if _, _, err := m.BindPrompt(0, "m", []events.SeqHash{hash(s, 1)}, rank(s%6), ""); err != nil {
			b.Fatal(err)
		}
	}
	prompt := make([]events.SeqHash, 512)
	for i := range prompt {
		prompt[i] = hash(-1, i)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, ok := m.Follow(0, "m", prompt); ok {
			b.Fatal("it continues no session")
		}
	}
}

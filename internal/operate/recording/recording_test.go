package recording

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

func testKeys(t testing.TB, fill byte) *Keys {
	t.Helper()
	k, err := NewKeys(bytes.Repeat([]byte{fill}, SecretBytes))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// memory is a stream in memory. It fails while broken is set.
type memory struct {
	mu     sync.Mutex
	list   []jetstream.RecordedBatch
	ids    map[string]bool
	broken error
	tries  int
}

func (m *memory) Store(_ context.Context, node, id string, data []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.tries++; m.broken != nil {
		return m.broken
	}
	if m.ids == nil {
		m.ids = map[string]bool{}
	}
	if !m.ids[id] {
		m.ids[id] = true
		m.list = append(m.list, jetstream.RecordedBatch{Seq: events.StreamSeq(len(m.list) + 1), Time: time.Now(), Node: node,
			Data: data})
	}
	return nil
}

func (m *memory) Ensure(context.Context) error { return nil }

func (m *memory) setBroken(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.broken = err
}

func (m *memory) Info(context.Context) (jetstream.RecordingInfo, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return jetstream.RecordingInfo{First: 1, Last: events.StreamSeq(len(m.list))}, nil
}

func (m *memory) Next(_ context.Context, from events.StreamSeq) (jetstream.RecordedBatch, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if int(from) > len(m.list) {
		return jetstream.RecordedBatch{}, jetstream.ErrNotFound
	}
	return m.list[from-1], nil
}

func newTest(t testing.TB, m Stream, span uint32) *Recorder {
	return New(Config{Node: "n1", Keys: testKeys(t, 7), Stream: m, Span: span, Log: slog.New(slog.DiscardHandler)})
}

// whole records requests with record, and reads them.
func whole(t *testing.T, span uint32, record func(*Recorder)) (list []*Joined, sum Summary) {
	t.Helper()
	m := &memory{}
	r := newTest(t, m, span)
	record(r)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r.Run(ctx) // stores all records
	sum, err := Read(t.Context(), m, Filter{}, func(q *Joined) error { list = append(list, q); return nil })
	if err != nil {
		t.Fatal(err)
	}
	return list, sum
}

func hashes(t testing.TB, tokens []uint32, space events.Space) []events.SeqHash {
	t.Helper()
	h, err := events.NewHasher(16, space)
	if err != nil {
		t.Fatal(err)
	}
	return events.SeqHashes(nil, h.Hash(nil, tokens))
}

func countTo(n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	return tokens
}

func observed(t testing.TB, id string, tokens []uint32, space events.Space) *Observed {
	return &Observed{Request: Request{Time: time.Now().UnixMilli(), Model: "m", BlockSize: 16, Tokens: uint64(len(tokens)),
		Output: 7, Policy: "kvatlas", Candidates: 3, Cached: 32, Computed: 5,
		Place: Place{Worker: "w1", Rank: 2, Device: 1, Host: 2, Disk: 3, Shared: 4, Guessed: 1, Requests: 5, PrefillTokens: 6,
			Blocks: 7}}, ID: id, SessionID: "session", AdapterName: "adapter", Salt: space.Salt,
		Sequence: hashes(t, tokens, space)}
}

// TestRoundTrip: a request, its end and its report are read as they were recorded, and joined.
func TestRoundTrip(t *testing.T) {
	t.Parallel()
	o := observed(t, "r1", countTo(1100), events.Space{})
	o.Flags = Booked | Disaggregated
	o.Prefill = Place{Worker: "p1", Device: 9}
	list, sum := whole(t, 512, func(r *Recorder) {
		r.Request(o)
		r.End("r1", End{Time: o.Time + 900, Freed: true, Life: 900, FirstToken: 80, Blocks: 4})
		r.Report("r1", Report{Time: o.Time + 950, Cached: 16})
		r.Answer("r1", Answer{Time: o.Time + 960, Tokens: 61})
		r.End("other", End{Time: o.Time})
	})
	if len(list) != 1 || sum != (Summary{Batches: 1, Requests: 1, Ends: 2, Reports: 1, Answers: 1}) {
		t.Fatalf("%d requests, %+v", len(list), sum)
	}
	q := list[0]
	if len(q.Names) != 3 || q.Session == 0 || q.Adapter == 0 || q.Request.Link == 0 || q.Node != "n1" {
		t.Errorf("%+v", q)
	}
	want := o.Request
	want.Names = q.Names
	if !reflect.DeepEqual(q.Request, want) {
		t.Errorf("read\n%+v, recorded\n%+v", q.Request, want)
	}
	if q.Flags != Booked|Disaggregated|Ended|Reported|Answered || q.Answer.Tokens != 61 ||
		q.End.Life != 900 || q.FirstToken != 80 || q.Blocks != 4 ||
		!q.Freed || q.Report.Cached != 16 {
		t.Errorf("%+v", q)
	}
}

// TestPrefixes: two prompts share as many names as they share whole spans, at each span and length.
func TestPrefixes(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		span := uint32(16 << rng.IntN(6))
		a := countTo(1 + rng.IntN(2000))
		b := append([]uint32(nil), a[:rng.IntN(len(a)+1)]...)
		same := len(b)
		for len(b) < 1+rng.IntN(2000) {
			b = append(b, 1e6+uint32(len(b)))
		}
		list, _ := whole(t, span, func(r *Recorder) {
			r.Request(observed(t, "a", a, events.Space{}))
			r.Request(observed(t, "b", b, events.Space{}))
		})
		one, two := list[0].Names, list[1].Names
		shared := 0
		for shared < min(len(one), len(two)) && one[shared] == two[shared] {
			shared++
		}
		count := func(tokens int) int { return (tokens/16*16 + int(span) - 1) / int(span) }
		want := same / int(span)
		if same/16 == len(a)/16 && same/16 == len(b)/16 {
			want = len(one) // equal to the last whole block
		}
		if shared != want || len(one) != count(len(a)) || len(two) != count(len(b)) {
			t.Fatalf("span %d: prompts of %d and %d tokens share %d tokens and %d names of %d and %d, want %d", span, len(a),
				len(b), same, shared, len(one), len(two), want)
		}
	}
}

// TestNothingIsLinked: names of one prompt and session differ between salts, models, block sizes and secrets, and a
// batch contains no text or hash of the request.
func TestNothingIsLinked(t *testing.T) {
	t.Parallel()
	tokens := countTo(600)
	plain := observed(t, "secret-id", tokens, events.Space{})
	others := []*Observed{observed(t, "secret-id", tokens, events.Space{Salt: "alice"}),
		observed(t, "secret-id", tokens, events.Space{Salt: "bob"}), observed(t, "secret-id", tokens, events.Space{}),
		observed(t, "secret-id", tokens, events.Space{})}
	others[2].Model = "other"
	others[3].EngineHashes = true
	seen := map[Name]int{}
	m := &memory{}
	r := newTest(t, m, 512)
	all := append([]*Observed{plain}, others...)
	for _, o := range all {
		r.Request(o)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r.Run(ctx)
	sessions := map[Name]bool{}
	if _, err := Read(t.Context(), m, Filter{}, func(q *Joined) error {
		for _, n := range q.Names {
			seen[n]++
		}
		sessions[q.Session] = true
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if len(seen) != 2*len(all) || len(sessions) != 3 {
		t.Errorf("%d names of %d prompts, %d sessions of three salts", len(seen), len(all), len(sessions))
	}
	data := m.list[0].Data
	for _, text := range []string{"secret-id", "session", "adapter", "alice", "bob"} {
		if bytes.Contains(data, []byte(text)) {
			t.Errorf("a batch contains %q", text)
		}
	}
	for _, o := range all {
		for _, h := range o.Sequence {
			if bytes.Contains(data, appendName(nil, Name(h))) {
				t.Errorf("a batch contains the hash %x", h)
			}
		}
	}
	var b block
	if x, y := testKeys(t, 1), testKeys(t, 2); x.text(&b, requestText, "a", "") == y.text(&b, requestText, "a", "") {
		t.Error("two secrets make the same name")
	}
	if testKeys(t, 1).text(&b, requestText, "a", "") == testKeys(t, 1).text(&b, sessionText, "a", "") {
		t.Error("a request and a session have the same name")
	}
}

// TestOutage: while the stream fails, the queue has a bound, further records are counted, and everything in the queue
// is stored afterwards, once.
func TestOutage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := &memory{}
		r := newTest(t, m, 16)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { r.Run(ctx); close(done) }()
		m.setBroken(errors.New("away"))
		o := observed(t, "", countTo(4096), events.Space{})
		const records = 8000 // some 16 MB
		for range records {
			o.Time = time.Now().UnixMilli()
			r.Request(o)
		}
		time.Sleep(time.Minute)
		c := r.Counts()
		if c.Dropped == 0 || c.Recorded+c.Dropped != records || c.Stored != 0 || c.Failing == nil ||
			c.Waiting > queueBytes+2*batchBytes {
			t.Fatalf("in the outage: %+v", c)
		}
		m.setBroken(nil)
		time.Sleep(time.Minute)
		r.Request(o)
		time.Sleep(2 * batchAge)
		after := r.Counts()
		if after.Stored != c.Recorded+1 || after.Waiting != 0 || after.Failing != nil || after.Dropped != c.Dropped {
			t.Fatalf("after the outage: %+v, before %+v", after, c)
		}
		cancel()
		<-done
		sum, err := Read(context.Background(), m, Filter{}, func(*Joined) error { return nil })
		if err != nil || sum.Requests != after.Stored || sum.Dropped != c.Dropped {
			t.Fatalf("%+v, %v; dropped %d", sum, err, c.Dropped)
		}
	})
}

// TestTooLarge: a batch that the server refuses for its size is dropped and counted, and the next one is stored.
func TestTooLarge(t *testing.T) {
	t.Parallel()
	m := &memory{broken: fmt.Errorf("store: %w", jetstream.ErrTooLarge)}
	r := newTest(t, m, 512)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r.Request(observed(t, "a", countTo(100), events.Space{}))
	r.Run(ctx)
	m.setBroken(nil)
	r.Request(observed(t, "b", countTo(100), events.Space{}))
	r.Run(ctx)
	sum, err := Read(t.Context(), m, Filter{}, func(*Joined) error { return nil })
	if c := r.Counts(); err != nil || c.Dropped != 1 || c.Stored != 1 || sum.Dropped != 1 || sum.Requests != 1 {
		t.Errorf("%+v, %+v, %v", c, sum, err)
	}
}

// TestSinceUntil: the reader finds the first batch by time, and returns requests in order of arrival.
func TestSinceUntil(t *testing.T) {
	t.Parallel()
	begin := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	m := &memory{}
	var b batch
	for i := range 200 { // a batch each minute, the requests of two nodes interleaved
		at := begin.Add(time.Duration(i) * time.Minute)
		b.begin(at.Add(-time.Second).UnixMilli(), 0)
		for _, before := range []time.Duration{300, 900} {
			b.request(&Request{Time: at.Add(-before * time.Millisecond).UnixMilli(), Model: "m", BlockSize: 16, Span: 512})
		}
		m.list = append(m.list, jetstream.RecordedBatch{Seq: events.StreamSeq(i + 1), Time: at, Data: b.end()})
	}
	m.list[150].Data = append([]byte("damaged"), m.list[150].Data[7:]...)
	last, n := int64(0), 0
	sum, err := Read(t.Context(), m, Filter{Since: begin.Add(100 * time.Minute), Until: begin.Add(160 * time.Minute)},
		func(q *Joined) error {
			if n++; q.Request.Time < last {
				t.Errorf("%d after %d", q.Request.Time, last)
			}
			last = q.Request.Time
			return nil
		})
	if err != nil || n != 2*60-2 || sum.Unreadable != 1 || !errors.Is(sum.Why, ErrFormat) || sum.Batches > 100 {
		t.Errorf("%d requests, %+v, %v", n, sum, err)
	}
}

// golden is a batch with every kind of record, from fixed names.
func golden() []byte {
	var b batch
	b.begin(1_700_000_000_000, 3)
	b.request(&Request{Time: 1_700_000_000_250, Link: 0x1122334455667788, Model: "org/model", BlockSize: 16, Span: 512,
		Tokens: 1100, Output: 64, Names: []Name{1, 2, 0xffffffffffffffff}, Session: 5, Adapter: 6,
		Flags: Booked | Disaggregated, Policy: "kvatlas", Candidates: 8, Cached: 512, Computed: 588,
		Place:   Place{Worker: "decode-1", Rank: 1, Requests: 3, PrefillTokens: 700, Blocks: 90},
		Prefill: Place{Worker: "prefill-1", Device: 32, Host: 2, Disk: 1, Shared: 4, Guessed: 1, Requests: 1}})
	b.request(&Request{Time: 1_700_000_000_300, Model: "org/model", BlockSize: 16, Span: 512, Tokens: 9,
		EngineHashes: true, Flags: Refused, Names: []Name{7}})
	b.ending(&End{Time: 1_700_000_002_000, Link: 0x1122334455667788, Freed: true, Life: 1750, FirstToken: 120, Blocks: 4})
	b.report(&Report{Time: 1_700_000_002_100, Link: 0x1122334455667788, Cached: 496})
	return b.end()
}

// goldenAnswer is a batch with an answer. Builds before this kind of record skip it.
func goldenAnswer() []byte {
	var b batch
	b.begin(1_700_000_000_000, 0)
	b.answer(&Answer{Time: 1_700_000_002_050, Link: 0x1122334455667788, Tokens: 61})
	return b.end()
}

// TestGoldenAnswer compares the format of answers with the bytes of earlier builds.
func TestGoldenAnswer(t *testing.T) {
	t.Parallel()
	const old = "4b565243010068e5cf8b01000000050b821088776655443322113dfaf43c4e"
	if now := fmt.Sprintf("%x", goldenAnswer()); now != old {
		t.Errorf("the format has changed: a batch is now\n%s", now)
	}
}

// TestOutputLength: the length of an answer is exact with the engine's number, whole blocks with reported blocks, and
// otherwise the expectation.
func TestOutputLength(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		flags        Flags
		length       uint64
		known, exact bool
	}{{0, 7, false, false}, {Ended, 64, true, false}, {Answered, 61, true, true}, {Ended | Answered, 61, true, true}} {
		var out bytes.Buffer
		e, err := NewExporter(&out, JSON, 512)
		if err != nil {
			t.Fatal(err)
		}
		q := &Joined{Request: Request{Model: "m", BlockSize: 16, Span: 512, Output: 7}, End: End{Blocks: 4},
			Answer: Answer{Tokens: 61}, Flags: c.flags}
		var l Line
		if err := errors.Join(e.Write(q), e.Flush(), json.Unmarshal(out.Bytes(), &l)); err != nil ||
			l.OutputLength != c.length || l.OutputKnown != c.known || l.OutputExact != c.exact {
			t.Errorf("%v: %v, %+v", c, err, l)
		}
	}
}

// TestGolden compares the format and the names with the files of earlier builds.
func TestGolden(t *testing.T) {
	t.Parallel()
	file := filepath.Join("testdata", "batch-v1.hex")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	old, err := hex.DecodeString(strings.Join(strings.Fields(string(text)), ""))
	if err != nil {
		t.Fatal(err)
	}
	if now := golden(); !bytes.Equal(now, old) {
		t.Errorf("the format has changed: a batch is now\n%x", now)
	}
	var kinds []string
	dropped, err := Decode(old, func(r Record) error {
		switch {
		case r.Request != nil:
			kinds = append(kinds, fmt.Sprintf("%s %d %x", r.Request.Place.Worker, r.Request.Tokens, r.Request.Names))
		case r.End != nil:
			kinds = append(kinds, fmt.Sprint("end ", r.End.Life))
		case r.Report != nil:
			kinds = append(kinds, fmt.Sprint("report ", r.Report.Cached))
		}
		return nil
	})
	want := "decode-1 1100 [1 2 ffffffffffffffff]; 9 [7];end 1750;report 496"
	if got := strings.Join(kinds, ";"); err != nil || dropped != 3 || got != want {
		t.Errorf("%v, %d, %s", err, dropped, got)
	}
	keys, b := testKeys(t, 7), block{}
	r := &Request{Model: "m", BlockSize: 16, Span: 32, Tokens: 85}
	names := fmt.Sprintf("%x", keys.prompt(nil, &b, r, []events.SeqHash{1, 2, 3, 4, 5}))
	if text := fmt.Sprintf("%x", uint64(keys.text(&b, sessionText, "s", "salt"))); names != goldenNames ||
		text != goldenText {
		t.Errorf("names have changed: %s %s", names, text)
	}
}

const (
	goldenNames = "[ef26765c6ee20295 276f63807797f4f5 a0e9028a8163f36c]"
	goldenText  = "3e241d69784bfdde"
)

// TestDecodeRejects: damaged batches and later versions are errors.
func TestDecodeRejects(t *testing.T) {
	t.Parallel()
	good := golden()
	none := func(Record) error { return nil }
	for i := range good {
		bad := bytes.Clone(good)
		bad[i] ^= 0x10
		if _, err := Decode(bad, none); !errors.Is(err, ErrFormat) && !errors.Is(err, ErrVersion) {
			t.Fatalf("byte %d is damaged: %v", i, err)
		}
	}
	for i := range len(good) {
		if _, err := Decode(good[:i], none); err == nil {
			t.Fatalf("%d bytes are a batch", i)
		}
	}
	if _, err := Decode(make([]byte, MaxBatch+1), none); !errors.Is(err, ErrFormat) {
		t.Fatal(err)
	}
}

// FuzzDecode: no input breaks the decoder, and every decoded record can be written again.
func FuzzDecode(f *testing.F) {
	f.Add(golden()[:len(golden())-tailBytes])
	f.Add(goldenAnswer()[:len(goldenAnswer())-tailBytes])
	f.Fuzz(func(t *testing.T, body []byte) {
		sealed := batch{buf: bytes.Clone(body)}
		data := sealed.end()
		var again batch
		var first []Record
		again.begin(0, 0)
		if _, err := Decode(data, func(r Record) error {
			first = append(first, r)
			switch {
			case r.Request != nil:
				again.request(r.Request)
			case r.End != nil:
				again.ending(r.End)
			case r.Report != nil:
				again.report(r.Report)
			default:
				again.answer(r.Answer)
			}
			return nil
		}); err != nil {
			return
		}
		i := 0
		if _, err := Decode(again.end(), func(r Record) error {
			if !reflect.DeepEqual(r, first[i]) {
				t.Fatalf("%+v becomes %+v", first[i], r)
			}
			i++
			return nil
		}); err != nil && len(data) < MaxBatch/2 {
			t.Fatal(err)
		}
	})
}

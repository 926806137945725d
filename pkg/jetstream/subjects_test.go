package jetstream

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvatlas/kvatlas/pkg/events"
)

func TestEscapeToken(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, token string }{
		{"", "="},
		{"worker-0_A", "worker-0_A"},
		{"a.b", "a=2Eb"},
		{"meta-llama/Llama-3.1-8B", "meta-llama=2FLlama-3=2E1-8B"},
		{"*", "=2A"}, {">", "=3E"}, {" ", "=20"}, {"=", "=3D"}, {"==", "=3D=3D"}, {"$JS", "=24JS"},
		{"ü\x00\xff", "=C3=BC=00=FF"},
		{strings.Repeat("a", 128), strings.Repeat("a", 128)},
		{strings.Repeat(".", 43), "==" + "Li4uLi4uLi4uLi4uLi4uLi4uLi4uLi4uLi4uLi4uLi4uLi4uLi4uLi4uLg"},
	} {
		token, err := EscapeToken(c.name)
		if err != nil || token != c.token {
			t.Errorf("EscapeToken(%q) = %q, %v; want %q", c.name, token, err, c.token)
		}
	}
	if token, err := EscapeToken(strings.Repeat("\xff", 255)); err != nil || len(token) != maxTokenLen {
		t.Errorf("longest name: %d bytes, %v; want %d", len(token), err, maxTokenLen)
	}
	if _, err := EscapeToken(strings.Repeat("a", 256)); !errors.Is(err, ErrBadName) {
		t.Errorf("too long a name: %v", err)
	}
	for _, bad := range []string{"", "a=", "a=2", "=2e", "=61", "==", "==YQ", "a.b", "=G0", "== ",
		strings.Repeat("a", 129), strings.Repeat("a", 500), "==*"} {
		if name, err := unescapeToken(bad); !errors.Is(err, ErrBadName) {
			t.Errorf("unescapeToken(%q) = %q, %v", bad, name, err)
		}
	}
}

// checkName checks any string: a valid token that converts back, or a refusal.
func checkName(t *testing.T, name string) {
	token, err := EscapeToken(name)
	if len(name) > maxNameLen {
		if !errors.Is(err, ErrBadName) {
			t.Fatalf("name of %d bytes: %v", len(name), err)
		}
		return
	}
	if err != nil || len(token) > maxTokenLen || strings.ContainsRune(token, '.') ||
		!server.IsValidLiteralSubject(token) || !validKey(token) {
		t.Fatalf("EscapeToken(%q) = %q, %v", name, token, err)
	}
	if back, err := unescapeToken(token); err != nil || back != name {
		t.Fatalf("%q became %q and %q, %v", name, token, back, err)
	}
	key := events.RankKey{Instance: events.WorkerID(name), Rank: events.Rank(len(name))}
	subject, err := Names("ns-1").Event(7, key)
	if err != nil || !server.IsValidPublishSubject(subject) ||
		!server.SubjectMatchesFilter(subject, Names("ns-1").streamSubjects(7)) {
		t.Fatalf("subject %q, %v", subject, err)
	}
	engine, err := Names("ns-1").Engine(key.Instance)
	back, named := Names("ns-1").ParseEngine(engine)
	if err != nil || !server.SubjectMatchesFilter(engine, Names("ns-1").Engines()) || !named || back != key.Instance {
		t.Fatalf("subject %q, %v: %q", engine, err, back)
	}
	claim, err := ClaimKey(key.Instance, name)
	worker, model, claims := ParseClaimKey(claim)
	if err != nil || !validKey(claim) || !claims || worker != key.Instance || model != name {
		t.Fatalf("key %q, %v: %q %q", claim, err, worker, model)
	}
	if ns, p, back, err := parseEventSubject(subject); err != nil || ns != "ns-1" || p != 7 || back != key {
		t.Fatalf("%q: %q %d %v %v", subject, ns, p, back, err)
	}
}

func FuzzEscapeToken(f *testing.F) {
	for _, s := range []string{"", "w.1", "a b", "*", "==", "\x00", strings.Repeat("/", 255)} {
		f.Add(s)
	}
	f.Fuzz(checkName)
}

// FuzzUnescapeToken: an accepted token is the only spelling of its name.
func FuzzUnescapeToken(f *testing.F) {
	for _, s := range []string{"=", "w=2E1", "==Li4u", "=2e", "a", "$"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, token string) {
		name, err := unescapeToken(token)
		if err != nil {
			if !errors.Is(err, ErrBadName) {
				t.Fatal(err)
			}
			return
		}
		if again, err := EscapeToken(name); err != nil || again != token {
			t.Fatalf("%q is %q with the token %q", token, name, again)
		}
	})
}

func FuzzParseEventSubject(f *testing.F) {
	for _, s := range []string{"kv.v1.ns.ev.0.w.0", "kv.v1..ev.0.w.0", "kv.v1.ns.ev.00.w.0", "kv.v1.ns.ev.0.w",
		"kv.v1.ns.ev.0.w.0.x", "kv.v1.ns.ev.4294967296.w.0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, subject string) {
		ns, p, key, err := parseEventSubject(subject)
		if err != nil {
			return
		}
		if again, err := Names(ns).Event(p, key); err != nil || again != subject {
			t.Fatalf("%q parsed and formatted is %q, %v", subject, again, err)
		}
	})
}

// FuzzParseClaimKey: an accepted key is the only spelling of its claim, and of no other record.
func FuzzParseClaimKey(f *testing.F) {
	for _, s := range []string{"serves.w1.llama", "serves.w1", "serves..m", "serves.w.m.x", "serves.=.=", "serves.=61.m",
		"0.w1.0", "operator.w1", "serves"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		instance, model, ok := ParseClaimKey(text)
		if !ok {
			return
		}
		if again, err := ClaimKey(instance, model); err != nil || again != text {
			t.Fatalf("%q is the claim %q, %v", text, again, err)
		}
		_, _, lease := ParseWorkerKey(text)
		if _, operator := ParseOperatorKey(text); lease || operator {
			t.Fatalf("%q is also a key of another record", text)
		}
	})
}

func TestNamesAtRandom(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(1, 1))
	for range 5000 {
		b := make([]byte, rng.IntN(270))
		for i := range b {
			b[i] = byte(rng.Uint32())
			if rng.IntN(3) > 0 {
				b[i] = "abcXYZ019-_./ *>=$"[rng.IntN(18)]
			}
		}
		checkName(t, string(b))
	}
}

// TestPartitionAgreesWithNATS compares with the server's own {{partition}}.
func TestPartitionAgreesWithNATS(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(2, 2))
	for _, partitions := range []uint32{1, 3, 16, 64, 256} {
		tr, err := server.NewSubjectTransform("in.*", "out.{{partition("+decimal(uint64(partitions))+",1)}}")
		if err != nil {
			t.Fatal(err)
		}
		for i := range 200 {
			name := "worker." + decimal(rng.Uint64N(1<<uint(i%60+1)))
			p, err := PartitionOf(events.WorkerID(name), partitions)
			if err != nil {
				t.Fatal(err)
			}
			token, err := EscapeToken(name)
			if err != nil {
				t.Fatal(err)
			}
			want, err := tr.Match("in." + token)
			if err != nil {
				t.Fatal(err)
			}
			if got := "out." + decimal(uint64(p)); got != want {
				t.Fatalf("%s of %d: %s, the server's is %s", name, partitions, got, want)
			}
		}
	}
}

func TestNodeSubject(t *testing.T) {
	t.Parallel()
	for node, want := range map[string]string{
		"ix-0": "kv.v1.prod.node.ix-0.find", "ix.zone a": "kv.v1.prod.node.ix=2Ezone=20a.find",
		"": "kv.v1.prod.node.=.find", "*.>": "kv.v1.prod.node.=2A=2E=3E.find",
	} {
		if got, err := Names("prod").Node(node, "find"); err != nil || got != want ||
			!server.IsValidLiteralSubject(got) {
			t.Errorf("node %q: %q, %v; want %q", node, got, err, want)
		}
	}
	if _, err := Names("prod").Node(strings.Repeat("n", 256), "find"); !errors.Is(err, ErrBadName) {
		t.Errorf("too long a name: %v", err)
	}
	for _, node := range []string{"kvatlas-indexer-0", "a.b c", ""} {
		subject, err := Names("prod").Node(node, "find")
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := ParseNodeSubject(subject); got != node || !ok {
			t.Errorf("ParseNodeSubject(%q) = %q, %v", subject, got, ok)
		}
	}
	for _, subject := range []string{Names("prod").Nodes(), "kv.v1.prod.q.find", "kv.v1.prod.node.a",
		"kv.v2.prod.node.a.find", "kv.v1.prod.ctl.0.node.1", "kv.v1.prod.node.=2.find", "_INBOX_node.x.y", ""} {
		if got, ok := ParseNodeSubject(subject); ok {
			t.Errorf("ParseNodeSubject(%q) = %q", subject, got)
		}
	}
}

func TestRegionDigestSubject(t *testing.T) {
	t.Parallel()
	for _, c := range [][3]string{{"eu", "n1", "kv.v1.prod.regions.eu.n1"},
		{"us-1", "a.b", "kv.v1.prod.regions.us-1.a=2Eb"}} {
		subject, err := Names("prod").RegionDigest(c[0], c[1])
		region, node, ok := Names("prod").ParseRegionDigest(subject)
		if err != nil || subject != c[2] || !ok || region != c[0] || node != c[1] {
			t.Errorf("%v: %q, %v is read as %q %q %v", c, subject, err, region, node, ok)
		}
		if !server.SubjectsCollide(subject, Names("prod").RegionDigests()) ||
			server.SubjectsCollide(subject, Names("prod").OwnRegion()) {
			t.Errorf("%s: %s covers too little, or %s too much", subject, Names("prod").RegionDigests(),
				Names("prod").OwnRegion())
		}
	}
	for _, subject := range []string{"kv.v1.prod.regions.eu", "kv.v1.prod.regions.eu.a.b", "kv.v1.prod.regions.eu.=2",
		"kv.v1.other.regions.eu.a", "kv.v1.prod.region", ""} {
		if region, node, ok := Names("prod").ParseRegionDigest(subject); ok {
			t.Errorf("%q is read as %q %q", subject, region, node)
		}
	}
	if _, err := Names("prod").RegionDigest("eu", strings.Repeat("n", 256)); !errors.Is(err, ErrBadName) {
		t.Errorf("too long a name: %v", err)
	}
}

func TestNamespaceNames(t *testing.T) {
	t.Parallel()
	for _, good := range []string{"a", "prod", "a-1", "0", strings.Repeat("x", 32)} {
		if err := CheckNamespace(good); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
	for _, bad := range []string{"", "-a", "A", "a_b", "a.b", "a b", "*", strings.Repeat("x", 33), "ü"} {
		if err := CheckNamespace(bad); !errors.Is(err, ErrBadName) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	for _, good := range []string{"a", "a.b", "p0.c.00ff", "model.a=2Fb", "A/b"} {
		if !validKey(good) {
			t.Errorf("%q is a key", good)
		}
	}
	for _, bad := range []string{"", ".", "a.", ".a", "a..b", "a b", "a*", "$x", ">"} {
		if validKey(bad) {
			t.Errorf("%q is not a key", bad)
		}
	}
}

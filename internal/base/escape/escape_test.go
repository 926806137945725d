package escape

import (
	"os/exec"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestText(t *testing.T) {
	for text, want := range map[string]string{
		"": "",
		"worker-1 ÄÖ 漢字 e\u0301 😀 \"'\\": "worker-1 ÄÖ 漢字 e\u0301 😀 \"'\\",
		"w\x1b]0;owned\a\x1b[2K":         `w\x1b]0;owned\a\x1b[2K`,
		"a\nb\rc\td\x00e\x7f":            `a\nb\rc\td\x00e\x7f`,
		"\u0085\u009b31m\u009d0;x\u009c": `\u0085\u009b31m\u009d0;x\u009c`,
		"\x9b31m\xff":                    `\x9b31m\xff`,
		"a\u2028b\u2029c":                `a\u2028b\u2029c`,
		"\u202etxt\u202c\u2066\u200f":    `\u202etxt\u202c\u2066\u200f`,
		"a\u200bb\u200c\u200d\u2060c":    `a\u200bb\u200c\u200d\u2060c`,
		"\ufeff\u00ad\u034f\u115f\u3164": `\ufeff\u00ad\u034f\u115f\u3164`,
		"a\ufe0f\U000e0041\u2800":        `a\ufe0f\U000e0041\u2800`,
		"a\u00a0b\u2003c\u3000":          `a\u00a0b\u2003c\u3000`,
		"\ufffd \ue000":                  "\ufffd" + ` \ue000`,
	} {
		if got := Text(text); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

// safe reports whether a text is safe for a terminal: a single line of printable UTF-8. It is the naive twin of Text.
func safe(text string) bool {
	for _, r := range text {
		switch {
		case r < 0x20, r >= 0x7f && r < 0xa0, r == 0x2028, r == 0x2029, r >= 0x200b && r <= 0x200f,
			r >= 0x202a && r <= 0x202e, r >= 0x2060 && r <= 0x206f, r == 0x061c, r == 0xfeff, r == 0xad,
			r >= 0xfe00 && r <= 0xfe0f, r >= 0xe0000 && r <= 0xe0fff:
			return false
		}
	}
	return utf8.ValidString(text)
}

func FuzzText(f *testing.F) {
	for _, text := range []string{"w\x1b[2J", "a\u202eb", "\xff\x9b", "a\\x1b", "\ufffd"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got := Text(text)
		if !safe(got) {
			t.Errorf("%q is shown as %q", text, got)
		}
		if Text(got) != got {
			t.Errorf("%q is shown as %q, then as %q", text, got, Text(got))
		}
		if safe(text) && strings.Contains(got, `\`) && !strings.Contains(text, `\`) && !strings.ContainsFunc(text, hidden) {
			t.Errorf("%q is safe but shown as %q", text, got)
		}
	})
}

// hidden reports characters that Text escapes and safe ignores.
func hidden(r rune) bool { return !shown(r, utf8.RuneLen(r)) }

// shell prints a word with sh.
func shell(t *testing.T, word string) string {
	t.Helper()
	out, err := exec.Command("sh", "-c", "printf %s "+word).Output()
	if err != nil {
		t.Fatalf("sh: %s: %v", word, err)
	}
	return string(out)
}

// checkShell compares the result of Shell with the word that a shell reads.
func checkShell(t *testing.T, text string) {
	t.Helper()
	word := Shell(text)
	if !safe(word) || Text(word) != word {
		t.Errorf("%q becomes %q", text, word)
	}
	want, _, _ := strings.Cut(text, "\x00")
	if want != text || strings.HasSuffix(want, "\n") {
		return
	}
	if got := shell(t, word); got != want {
		t.Errorf("%q becomes %s, which a shell reads as %q", text, word, got)
	}
}

func TestShell(t *testing.T) {
	for text, want := range map[string]string{"worker-1": "worker-1", "http://w:8000/v1": "http://w:8000/v1",
		"": "''", "a b": "'a b'", "it's": `'it'\''s'`, "-x": "'-x'", "~": "'~'", "a=b": "'a=b'",
		"$(id)`id`;id|id&": "'$(id)`id`;id|id&'",
		"\x1b":             `"$(printf '\033')"`,
		"a\nb'%\\":         `"$(printf 'a\012b\047%%\134')"`} {
		if got := Shell(text); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
		checkShell(t, text)
	}
	for _, text := range []string{"!!", "#", "*", "\"", "a\"b\x1b\"$x`id`", "ä\u202eb", "\xff\xfe", "{a,b}\t", "-n\r", " ",
		"\u2028", "%s\x01%d", "\\\x02\\n"} {
		checkShell(t, text)
	}
}

func FuzzShell(f *testing.F) {
	for _, text := range []string{"it's", "a\nb", "$(id)", "\"`\x1b", "-n", "%\x00", "\xff", "\\\x7f"} {
		f.Add(text)
	}
	f.Fuzz(checkShell)
}

package rights

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

const token = "0123456789abcdef"

// TestParse reads valid files, with the roles of each token, and invalid files. Errors contain the line and the remedy,
// and never the token.
func TestParse(t *testing.T) {
	for text, want := range map[string]string{
		token:                               "0123456789abcdef read or route or register or operate",
		token + "\n":                        "0123456789abcdef read or route or register or operate",
		"read " + token:                     "0123456789abcdef read",
		"  route\t" + token + "\r\n\n# x\n": "0123456789abcdef read or route",
		"register,operate " + token:         "0123456789abcdef read or register or operate",
		"register " + token + "\n" + token[1:] + "zz": "0123456789abcdef register, 123456789abcdefzz read or route or register or operate",
	} {
		list, err := New([]byte(text))
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		for _, each := range strings.Split(want, ", ") {
			given, roles, _ := strings.Cut(each, " ")
			if got := list.Of("Bearer " + given).String(); got != roles {
				t.Errorf("%q: %s has %q, want %q", text, given, got, roles)
			}
		}
	}
	for text, want := range map[string]string{
		"": "no token", "# only this": "no token", "short": "line 1: a token of 5 bytes is too short",
		token + "\nread short": "line 2: a token of 5 bytes", "read": "line 1: a token of 4 bytes",
		"write " + token: `line 1: role "write" is none of read, route, register, operate`,
		"Read " + token:  `role "Read"`, "read, route " + token: `role ""`, token + " read": "text follows the token",
		"read " + token + " x":                    "more than roles and a token",
		token + "\nread " + token:                 "line 2: an earlier line has the same token",
		strings.Repeat("x", maxFile+1):            "more than 65536 bytes",
		strings.Repeat(token+"%d\n", maxTokens+1): "more than 256 tokens",
	} {
		if n := strings.Count(text, "%d"); n > 0 {
			numbers := make([]any, n)
			for i := range numbers {
				numbers[i] = i
			}
			text = fmt.Sprintf(text, numbers...)
		}
		_, err := New([]byte(text))
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), token) {
			t.Errorf("%.40q: %v, want %s", text, err, want)
		}
	}
}

// TestHeader: only a complete token in a bearer header is valid.
func TestHeader(t *testing.T) {
	list, err := New([]byte("read " + token))
	if err != nil {
		t.Fatal(err)
	}
	for header, want := range map[string]Roles{"Bearer " + token: Read, "bearer " + token: Read, "": 0, "Bearer": 0,
		"Bearer ": 0, "Basic " + token: 0, token: 0, "Bearer " + token + " ": 0, "Bearer  " + token: 0,
		"Bearer read " + token: 0, "Bearer " + token[1:]: 0, "Bearer " + strings.ToUpper(token): 0} {
		if got := list.Of(header); got != want {
			t.Errorf("%q has %v, want %v", header, got, want)
		}
	}
	var none *Tokens
	if none.Check("", Operate, "") != nil || none.Problem() != "" {
		t.Error("without a file a request is refused")
	}
	for needs, want := range map[Roles]api.Code{Anybody: "", Any: "", Read: "", Route: api.CodeForbidden,
		Register | Operate: api.CodeForbidden} {
		failure := list.Check("Bearer "+token, needs, "")
		if got := map[bool]api.Code{true: api.CodeForbidden}[failure != nil]; got != want {
			t.Errorf("%v: %v", needs, failure)
		}
		if failure != nil && !strings.Contains(failure.Message, needs.String()) {
			t.Errorf("%v is not named: %v", needs, failure)
		}
	}
}

// TestReload changes a file as operators, editors and Kubernetes do. An invalid file leaves the tokens unchanged, and
// is reported as a problem until it is corrected.
func TestReload(t *testing.T) {
	dir := t.TempDir()
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	link := func(to string) { // replaces the link as the kubelet does with ..data
		t.Helper()
		next := filepath.Join(dir, "next")
		if err := os.Symlink(to, next); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	text := func(i int) string { return fmt.Sprint(token, "-", i) }
	folder := func(i int) string {
		t.Helper()
		of := filepath.Join(dir, fmt.Sprint("of", i))
		if err := os.Mkdir(of, 0o700); err != nil {
			t.Fatal(err)
		}
		write(filepath.Join(of, "token"), text(i))
		return of
	}
	link(folder(0))
	path := filepath.Join(dir, "token")
	if err := os.Symlink(filepath.Join("..data", "token"), path); err != nil {
		t.Fatal(err)
	}
	list, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	counts := func(want ...int) {
		t.Helper()
		for i := range 12 {
			has := list.Of("Bearer "+text(i)) != 0
			is := false
			for _, w := range want {
				is = is || w == i
			}
			if has != is {
				t.Errorf("token %d is valid: %v", i, has)
			}
		}
	}
	look := func(changes bool, wrong string) {
		t.Helper()
		if changed, err := list.Look(); changed || err != nil {
			t.Errorf("at the first look: %v, %v", changed, err)
		}
		changed, err := list.Look()
		if changed != changes || (err != nil) != (wrong != "") || err != nil && !strings.Contains(err.Error(), wrong) {
			t.Errorf("%v, %v; want %v, %q", changed, err, changes, wrong)
		}
		if changed, err := list.Look(); changed || err != nil {
			t.Errorf("the change is reported again: %v, %v", changed, err)
		}
		if problem := list.Problem(); !strings.Contains(problem, wrong) || wrong == "" && problem != "" {
			t.Errorf("the problem is %q, want %q", problem, wrong)
		}
	}
	counts(0)
	look(false, "")
	link(folder(1))
	look(true, "")
	counts(1)
	write(path, text(1)+"\n"+text(2)) // written in place, through both links
	look(true, "")
	counts(1, 2)
	write(path, text(3)) // other content of the same size as the first
	look(true, "")
	counts(3)
	write(path, "")
	look(false, "too short")
	counts(3)
	write(path, "write "+text(4))
	look(false, `role "write"`)
	counts(3)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	look(false, "no such file")
	counts(3)
	write(path, text(3)) // the earlier content
	look(true, "")
	counts(3)
	other := filepath.Join(dir, "other")
	write(other, "read "+text(5))
	if err := os.Rename(other, path); err != nil {
		t.Fatal(err)
	}
	look(true, "")
	counts(5)
	if list.Of("Bearer "+text(5)) != Read {
		t.Error("the roles are not those of the new file")
	}
	write(path, text(6)) // half of a write
	if changed, _ := list.Look(); changed {
		t.Error("a text is valid after one read")
	}
	write(path, text(7))
	look(true, "")
	counts(7)
}

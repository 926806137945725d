// Package rights decides which bearer tokens may use a port, and for what.
//
// A [Tokens] holds the tokens of a file. [Open] reads it, [Tokens.Watch] reads it again while the program runs, and
// [Tokens.Of] returns the roles of a request's token. A port asks [Tokens.Check], which compares them with the roles
// that a route needs.
//
// Each line of the file is "TOKEN" or "ROLE[,ROLE]... TOKEN". A token without roles has all of them. Empty lines and
// lines that begin with # are comments. Any goroutine may use a Tokens.
package rights

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Roles is a set of roles. A route names the roles that may use it; a token has some.
type Roles uint8

// The roles of tokens.
const (
	Read     = Roles(api.AccessRead)     // queries, the status, metrics and the live page
	Route    = Roles(api.AccessRoute)    // choices, bookings and reports; Read is part of it
	Register = Roles(api.AccessRegister) // registers engines and workers, and ends the registrations
	Operate  = Roles(api.AccessOperate)  // changes, drains, snapshots, exports and verifies; Read is part of it

	// Any is for routes that each token may use.
	Any = Read | Route | Register | Operate

	// Anybody is for routes that need no token, such as health checks. No token has it.
	Anybody Roles = 1 << 7
)

var names = []string{"read", "route", "register", "operate"}

func (r Roles) String() string {
	if r == Anybody {
		return "anybody"
	}
	var list []string
	for i, name := range names {
		if r&(1<<i) != 0 {
			list = append(list, name)
		}
	}
	return strings.Join(list, " or ")
}

// ParseRoles reads roles that are separated by commas, and adds those that are part of them.
func ParseRoles(text string) (roles Roles, err error) {
	for _, name := range strings.Split(text, ",") {
		role := Roles(0)
		for i := range names {
			if names[i] == name {
				role = 1 << i
			}
		}
		if role == 0 {
			return 0, fmt.Errorf("role %.20q is none of %s", name, strings.Join(names, ", "))
		}
		if role == Route || role == Operate {
			role |= Read
		}
		roles |= role
	}
	return roles, nil
}

// Bounds of a token file.
const (
	MinToken  = 16  // bytes of a token
	maxTokens = 256 // each is compared for each request
	maxFile   = 64 << 10
)

// list is the content of a file. It does not change.
type list struct {
	digests [][sha256.Size]byte
	roles   []Roles
}

// parse reads the lines of a file. Its errors name a line and never a token.
func parse(text []byte) (*list, error) {
	l := &list{}
	if len(text) > maxFile {
		return nil, fmt.Errorf("it has more than %d bytes", maxFile)
	}
	for i, line := range bytes.Split(text, []byte{'\n'}) {
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		roles, token := Any, line
		if fields := bytes.Fields(line); len(fields) > 1 {
			var err error
			if roles, err = ParseRoles(string(fields[0])); err != nil && len(fields[0]) >= MinToken {
				err = errors.New("text follows the token; write ROLE[,ROLE] before it")
			} else if err == nil && len(fields) > 2 {
				err = errors.New("it has more than roles and a token; write the roles without blanks")
			}
			if err != nil {
				return nil, fmt.Errorf("line %d: %w", i+1, err)
			}
			token = fields[1]
		}
		digest := sha256.Sum256(token)
		switch {
		case len(token) < MinToken:
			return nil, fmt.Errorf("line %d: a token of %d bytes is too short; use at least %d", i+1, len(token), MinToken)
		case l.of(digest) != 0:
			return nil, fmt.Errorf("line %d: the token is in an earlier line too; write all its roles in one", i+1)
		case len(l.digests) == maxTokens:
			return nil, fmt.Errorf("line %d: there are more than %d tokens", i+1, maxTokens)
		}
		l.digests, l.roles = append(l.digests, digest), append(l.roles, roles)
	}
	if len(l.digests) == 0 {
		return nil, fmt.Errorf("it has no token: a token of 0 bytes is too short; use at least %d", MinToken)
	}
	return l, nil
}

// of returns the roles of a digest, 0 if it is of no token. It takes the same time for each.
func (l *list) of(digest [sha256.Size]byte) (roles Roles) {
	for i := range l.digests {
		same := subtle.ConstantTimeCompare(l.digests[i][:], digest[:])
		roles |= Roles(-same) & l.roles[i]
	}
	return roles
}

// Tokens are the tokens of a file. A nil Tokens lets each request pass.
type Tokens struct {
	path    string
	now     atomic.Pointer[list]
	read    []byte // the text behind now; only Look uses it
	pending []byte // another text that was seen once
	failed  atomic.Pointer[error]
}

// Open reads a file. Its errors say what is wrong with the content.
func Open(path string) (*Tokens, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	t, err := New(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	t.path = path
	return t, nil
}

// New returns the tokens of a text, as a file has it.
func New(text []byte) (*Tokens, error) {
	now, err := parse(text)
	if err != nil {
		return nil, err
	}
	t := &Tokens{read: text}
	t.now.Store(now)
	return t, nil
}

// Of returns the roles of the token in the value of an Authorization header, 0 if it has no token that is in the file.
func (t *Tokens) Of(header string) Roles {
	if t == nil {
		return Any
	}
	scheme, given, _ := strings.Cut(header, " ")
	if !strings.EqualFold(scheme, "Bearer") {
		given = ""
	}
	return t.now.Load().of(sha256.Sum256([]byte(given)))
}

// Check returns an error if the header's token lets nobody use what needs one of the roles: unauthorized without a
// token of the file, forbidden without the role. how says where the token belongs.
func (t *Tokens) Check(header string, needs Roles, how string) *api.Error {
	if needs == Anybody || t == nil {
		return nil
	}
	switch has := t.Of(header); {
	case has == 0:
		return api.Errorf(api.CodeUnauthorized, "this port wants a bearer token: %s", how)
	case has&needs == 0:
		a := "role"
		if bits.OnesCount8(uint8(needs)) > 1 {
			a = "role of"
		}
		return api.Errorf(api.CodeForbidden, "the token has the role %s, and this needs the %s %s; "+
			"add it to the token's line in the file of --http-token-file", strings.ReplaceAll(has.String(), " or ", ","), a,
			needs)
	}
	return nil
}

// Count returns how many tokens there are.
func (t *Tokens) Count() int { return len(t.now.Load().digests) }

// Look reads the file again. A new text counts when it was the same twice: a program that writes in place may have
// written a part. A text that cannot be used leaves the tokens as they are, and is [Tokens.Problem] until it is
// mended. changed reports new tokens, and err a text that was not seen before and cannot be used.
func (t *Tokens) Look() (changed bool, err error) {
	text, err := os.ReadFile(t.path)
	if err != nil {
		text = []byte("# " + err.Error()) // a text as any other, with no token in it
	}
	switch {
	case bytes.Equal(text, t.read):
		t.pending = nil
		return false, nil
	case !bytes.Equal(text, t.pending) || t.pending == nil:
		t.pending = text
		return false, nil
	}
	t.read, t.pending = text, nil
	var now *list
	if err == nil {
		now, err = parse(text)
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", t.path, err)
		t.failed.Store(&err)
		return false, err
	}
	t.failed.Store(nil)
	t.now.Store(now)
	return true, nil
}

// Problem returns why the file is not used as it is now; empty if it is.
func (t *Tokens) Problem() string {
	if t == nil {
		return ""
	}
	if err := t.failed.Load(); err != nil {
		return "the token file cannot be used, and the tokens that it had before count: " + (*err).Error() +
			"; what to do: mend the file; it is read again within seconds"
	}
	return ""
}

// every is how often Watch looks. A new file counts after two looks.
const every = time.Second

// Watch calls Look until ctx ends, and told with what became of each new text. A nil Tokens has no file to watch.
func (t *Tokens) Watch(ctx context.Context, told func(changed bool, err error)) {
	if t == nil {
		return
	}
	loop.Every(ctx, every, func(time.Time) {
		if changed, err := t.Look(); changed || err != nil {
			told(changed, err)
		}
	})
}

// LogChanges returns a function for Watch that makes log lines.
func (t *Tokens) LogChanges(log *slog.Logger) func(changed bool, err error) {
	return func(changed bool, err error) {
		if err != nil {
			log.Error("the token file cannot be used; the tokens that it had before count", "file", t.path, "error", err,
				"what_to_do", "mend the file; it is read again within seconds")
			return
		}
		log.Info("the token file has changed and counts from now on", "file", t.path, "tokens", t.Count())
	}
}

// LogStart makes log lines of a file that other users may read, and of ports where tokens can be overheard. open has
// the addresses without TLS that other hosts can reach.
func (t *Tokens) LogStart(log *slog.Logger, open []string) {
	if t == nil {
		return
	}
	if info, err := os.Stat(t.path); err == nil && info.Mode().Perm()&0o004 != 0 {
		log.Warn("every user of this host can read the token file", "file", t.path, "what_to_do", "chmod o-r "+t.path)
	}
	if len(open) > 0 {
		log.Warn("bearer tokens cross the network in clear text", "listen", strings.Join(open, " "), "what_to_do",
			ClearTextRemedy)
	}
}

// ClearTextRemedy is what helps where tokens cross the network in clear text.
const ClearTextRemedy = "give --http-cert and --http-key, or let only a proxy on this host with TLS reach the port"

// Package rights maps bearer tokens to the roles that may use a port.
//
// A [Tokens] contains the tokens of a file. [Open] reads the file, [Tokens.Watch] reads it again while the program
// runs, and [Tokens.Of] returns the roles of a request's token. A port calls [Tokens.Check] with the roles that a route
// needs.
//
// Each line of the file is "TOKEN" or "ROLE[,ROLE]... TOKEN". A token without roles has all roles. Empty lines and
// lines with a leading # are comments. A Tokens is safe for concurrent use.
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

// Roles is a set of roles, of a token or of the tokens that may use a route.
type Roles uint8

// The roles of tokens.
const (
	Read     = Roles(api.AccessRead)     // queries, the status, metrics and the live page
	Route    = Roles(api.AccessRoute)    // choices, bookings and reports; includes Read
	Register = Roles(api.AccessRegister) // registers engines and workers, and ends the registrations
	Operate  = Roles(api.AccessOperate)  // changes, drains, snapshots, exports and verifies; includes Read

	// Any is for routes that every token may use.
	Any = Read | Route | Register | Operate

	// The role of routes without a token, such as health checks. No token has the role.
	Anybody Roles = 1 << 7
)

// names has the name of each role, in the order of the bits of api.Access.
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

// ParseRoles reads roles separated by commas, and adds the roles that they include.
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
	MinToken  = 16  // minimum bytes of a token
	maxTokens = 256 // every request is compared with every token
	maxFile   = 64 << 10
)

// list is the content of a file. It is immutable.
type list struct {
	digests [][sha256.Size]byte
	roles   []Roles
}

// parse reads the lines of a file. Its errors contain the line number and never a token.
func parse(text []byte) (*list, error) {
	l := &list{}
	if len(text) > maxFile {
		return nil, fmt.Errorf("the file has more than %d bytes", maxFile)
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
				err = errors.New("text follows the token; write ROLE[,ROLE] before the token")
			} else if err == nil && len(fields) > 2 {
				err = errors.New("the line has more than roles and a token; write the roles without blanks")
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
		case l.rolesOf(digest) != 0:
			return nil, fmt.Errorf("line %d: an earlier line has the same token; write all roles of a token in one line", i+1)
		case len(l.digests) == maxTokens:
			return nil, fmt.Errorf("line %d: the file has more than %d tokens", i+1, maxTokens)
		}
		l.digests, l.roles = append(l.digests, digest), append(l.roles, roles)
	}
	if len(l.digests) == 0 {
		return nil, fmt.Errorf("the file has no token: a token of 0 bytes is too short; use at least %d", MinToken)
	}
	return l, nil
}

// rolesOf returns the roles of a token's digest, 0 for an unknown token. The time is the same for all digests.
func (l *list) rolesOf(digest [sha256.Size]byte) (roles Roles) {
	for i := range l.digests {
		same := subtle.ConstantTimeCompare(l.digests[i][:], digest[:])
		roles |= Roles(-same) & l.roles[i]
	}
	return roles
}

// Tokens are the tokens of a file. A nil Tokens permits every request.
type Tokens struct {
	path    string
	now     atomic.Pointer[list]
	read    []byte // the text of now; used only by Look
	pending []byte // a new text that was read once
	failed  atomic.Pointer[error]
}

// Open reads a file. Its errors describe the fault in the content.
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

// New returns the tokens of a file's text.
func New(text []byte) (*Tokens, error) {
	now, err := parse(text)
	if err != nil {
		return nil, err
	}
	t := &Tokens{read: text}
	t.now.Store(now)
	return t, nil
}

// Of returns the roles of the token in an Authorization header, 0 without a token of the file.
func (t *Tokens) Of(header string) Roles {
	if t == nil {
		return Any
	}
	scheme, given, _ := strings.Cut(header, " ")
	if !strings.EqualFold(scheme, "Bearer") {
		given = ""
	}
	return t.now.Load().rolesOf(sha256.Sum256([]byte(given)))
}

// Check returns an error if the header's token does not have one of the needed roles: unauthorized without a token of
// the file, forbidden without the role. how states where the token belongs in the request.
func (t *Tokens) Check(header string, needs Roles, how string) *api.Error {
	if needs == Anybody || t == nil {
		return nil
	}
	switch has := t.Of(header); {
	case has == 0:
		return api.Errorf(api.CodeUnauthorized, "this port requires a bearer token: %s", how)
	case has&needs == 0:
		a := "role"
		if bits.OnesCount8(uint8(needs)) > 1 {
			a = "role of"
		}
		return api.Errorf(api.CodeForbidden, "the token has the role %s, and the request needs the %s %s; "+
			"add it to the token's line in the file of --http-token-file", strings.ReplaceAll(has.String(), " or ", ","), a,
			needs)
	}
	return nil
}

// Count returns the number of tokens.
func (t *Tokens) Count() int { return len(t.now.Load().digests) }

// Look reads the file again. A new text becomes valid when two consecutive reads return it, because a program may have
// written only a part. An invalid text leaves the tokens unchanged, and [Tokens.Problem] returns its fault until the
// file is corrected. changed reports new tokens. err reports the fault of a new invalid text.
func (t *Tokens) Look() (changed bool, err error) {
	text, err := os.ReadFile(t.path)
	if err != nil {
		text = []byte("# " + err.Error()) // an error is treated as a text without tokens
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

// Problem returns the fault of the present file; empty if the file is valid.
func (t *Tokens) Problem() string {
	if t == nil {
		return ""
	}
	if err := t.failed.Load(); err != nil {
		return "the token file is invalid, and its earlier tokens stay valid: " + (*err).Error() +
			"; what to do: " + "correct the file; the indexer reads the file again within seconds"
	}
	return ""
}

// every is the interval of Watch. A new file becomes valid after two reads.
const every = time.Second

// Watch calls Look until ctx ends, and calls report with the result for each new text. A nil Tokens has no file to
// watch.
func (t *Tokens) Watch(ctx context.Context, report func(changed bool, err error)) {
	if t == nil {
		return
	}
	loop.Every(ctx, every, func(time.Time) {
		if changed, err := t.Look(); changed || err != nil {
			report(changed, err)
		}
	})
}

// LogChanges returns a function for Watch that writes log lines.
func (t *Tokens) LogChanges(log *slog.Logger) func(changed bool, err error) {
	return func(changed bool, err error) {
		if err != nil {
			log.Error("the token file is invalid; its earlier tokens stay valid", "file", t.path, "error", err,
				"what_to_do", "correct the file; the indexer reads the file again within seconds")
			return
		}
		log.Info("the tokens of the changed token file are valid now", "file", t.path, "tokens", t.Count())
	}
}

// LogStart logs warnings about a token file that other users may read, and about ports where tokens are sent in clear
// text. open contains the addresses without TLS that other hosts can reach.
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

// ClearTextRemedy is the remedy for tokens that cross the network in clear text.
const ClearTextRemedy = "give --http-cert and --http-key, or let only a proxy on this host with TLS reach the port"

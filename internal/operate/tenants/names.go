package tenants

import (
	"context"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// The sources of tenants that are not headers.
const (
	Salt    = "salt"    // the cache salt
	Adapter = "adapter" // the LoRA adapter
	APIKey  = "api-key" // the bearer token of the header Authorization, or the header X-Api-Key or Api-Key

	header = "header=" // with the name of the header
)

// Other is the name of the requests of replaced tenants.
const Other = "other"

const (
	maxSources = 8
	maxValue   = 64 // bytes of a value in a name; longer values are hashed
	hashMark   = "#"
)

var headerName = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,63}$`)

// CheckSources returns an error for an invalid list of sources.
func CheckSources(sources []string) error {
	if len(sources) > maxSources {
		return fmt.Errorf("has %d sources, more than %d", len(sources), maxSources)
	}
	for i, s := range sources {
		name, isHeader := strings.CutPrefix(s, header)
		switch {
		case slices.Contains(sources[:i], s):
			return fmt.Errorf("has %q twice", s)
		case isHeader && (name == Salt || name == Adapter || name == APIKey || slices.Contains(keyHeaders, name)):
			return fmt.Errorf("has %q: this header's value or name belongs to another source; use %s", s, APIKey)
		case isHeader && !headerName.MatchString(name):
			return fmt.Errorf("has %q: a header's name has lower-case letters, digits, _ and -", s)
		case !isHeader && s != Salt && s != Adapter && s != APIKey:
			return fmt.Errorf("has %q; the sources are %s, %s, %s and %sNAME", s, Salt, Adapter, APIKey, header)
		}
	}
	return nil
}

// keyHeaders are the headers of API keys, in this order.
var keyHeaders = []string{"authorization", "x-api-key", "api-key"}

// Names makes the names of tenants. A nil Names makes no names.
type Names struct {
	sources []string
	hashed  bool
	key     []byte
	edge    bool // a source is in headers
}

// NewNames returns the names of tenants: the first source with a value names the tenant. With hashed, all values are
// hashed. The secret is the key of the hashes. Names without sources are nil.
func NewNames(sources []string, hashed bool, secret []byte) (*Names, error) {
	if len(sources) == 0 {
		return nil, nil
	}
	if err := CheckSources(sources); err != nil {
		return nil, err
	}
	key, err := hkdf.Key(sha256.New, secret, nil, "kvatlas tenants 1", sha256.Size)
	if err != nil {
		return nil, err
	}
	n := &Names{sources: sources, hashed: hashed, key: key}
	for _, s := range sources {
		n.edge = n.edge || s != Salt && s != Adapter
	}
	return n, nil
}

// Spaces reports whether all sources determine the hashes of blocks: the blocks of a tenant are then known.
func (n *Names) Spaces() bool { return n != nil && !n.edge }

type contextKey struct{}

// edgeName is the first source with a value in the headers of a request.
type edgeName struct {
	source int
	name   string
}

// With adds the tenant in a request's headers to a context. header returns the value of a header, by its name in lower
// case; empty: none.
func (n *Names) With(ctx context.Context, header func(name string) string) context.Context {
	if n == nil || !n.edge {
		return ctx
	}
	for i, s := range n.sources {
		value := ""
		switch s {
		case Salt, Adapter:
			continue
		case APIKey:
			value = apiKey(header)
		default:
			value = header(sourceName(s))
		}
		if value != "" {
			return context.WithValue(ctx, contextKey{}, edgeName{i, n.name(s, value)})
		}
	}
	return ctx
}

func apiKey(header func(string) string) string {
	for _, name := range keyHeaders {
		value := header(name)
		if name == keyHeaders[0] {
			scheme, token, _ := strings.Cut(value, " ")
			if !strings.EqualFold(scheme, "bearer") {
				continue
			}
			value = strings.TrimSpace(token)
		}
		if value != "" {
			return value
		}
	}
	return ""
}

// Of returns the name of a request's tenant; empty: none.
func (n *Names) Of(ctx context.Context, salt, adapter string) string {
	if n == nil {
		return ""
	}
	edge, _ := ctx.Value(contextKey{}).(edgeName)
	for i, s := range n.sources {
		switch {
		case s == Salt && salt != "":
			return n.name(s, salt)
		case s == Adapter && adapter != "":
			return n.name(s, adapter)
		case edge.name != "" && edge.source == i:
			return edge.name
		}
	}
	return ""
}

// sourceName returns the source in a name: a header's name, or the source.
func sourceName(source string) string { return strings.TrimPrefix(source, header) }

// name returns the name of a value: SOURCE:VALUE, or SOURCE:#HASH.
func (n *Names) name(source, value string) string {
	if n.hashed || source == APIKey || len(value) > maxValue || strings.HasPrefix(value, hashMark) || !printable(value) {
		mac := hmac.New(sha256.New, n.key)
		mac.Write([]byte(source + "\x00" + value))
		value = hashMark + hex.EncodeToString(mac.Sum(nil)[:8])
	}
	return sourceName(source) + ":" + value
}

func printable(value string) bool {
	return utf8.ValidString(value) && !strings.ContainsFunc(value, func(r rune) bool { return !unicode.IsPrint(r) })
}

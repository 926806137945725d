package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/natsurl"
	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/spf13/pflag"
)

// NATS is the connection of a program's flags.
type NATS struct {
	URL      string
	name     string    // prefix of the flags, without dashes
	how      []*string // values of the flags, except the address
	options  jetstream.ConnOptions
	optional bool
}

// NATSFlags adds the flags of a NATS connection. If optional is true, --nats may be empty, which means no connection.
func NATSFlags(flags *pflag.FlagSet, optional bool) *NATS {
	def, usage := "nats://127.0.0.1:4222", "NATS server, or several separated by commas"
	if optional {
		def, usage = "", "use this NATS server, or several separated by commas, instead of an embedded server"
	}
	return natsFlags(flags, "nats", def, usage, optional)
}

// OtherNATSFlags adds the flags of a further connection, --NAME, --NAME-creds and so on. An empty --NAME means no
// connection.
func OtherNATSFlags(flags *pflag.FlagSet, name, usage string) *NATS {
	return natsFlags(flags, name, "", usage, true)
}

func natsFlags(flags *pflag.FlagSet, name, def, usage string, optional bool) *NATS {
	n := &NATS{name: name, optional: optional}
	text := func(into *string, suffix, def, usage string) {
		if env := KnownNames[name+suffix]; env != "" && suffix != "-password" && suffix != "-token" {
			usage += " (also " + env + ")"
		}
		flags.StringVar(into, name+suffix, def, usage)
		if suffix != "" {
			n.how = append(n.how, into)
		}
	}
	text(&n.URL, "", def, usage)
	o := &n.options
	text(&o.CredsFile, "-creds", "", "credentials file")
	text(&o.NkeyFile, "-nkey", "", "file with an nkey seed")
	text(&o.User, "-user", "", "user")
	text(&o.Password, "-password", "", "password; better given as "+secretVariable(name+"-password"))
	text(&o.Token, "-token", "", "token; better given as "+secretVariable(name+"-token"))
	text(&o.CAFile, "-ca", "", "file with the certificate authorities of the server")
	text(&o.CertFile, "-cert", "", "file with this client's certificate")
	text(&o.KeyFile, "-key", "", "file with the private key of the certificate")
	text(&o.InboxPrefix, "-inbox-prefix", "",
		"prefix of the reply subjects, if permissions require it; it begins with _INBOX "+
			"(default: the prefix in --"+name+"-creds or in the folder of --"+name+"-nkey, or _INBOX)")
	return n
}

// secretVariable returns the environment variable of a flag for a secret.
func secretVariable(flag string) string {
	if name := KnownNames[flag]; name != "" {
		return name
	}
	return variable(flag)
}

// Options returns the options of the connection.
func (n *NATS) Options(name string) (jetstream.ConnOptions, error) {
	o := n.options
	o.Name = name
	for _, url := range strings.Split(n.URL, ",") {
		if url = strings.TrimSpace(url); url != "" {
			if !strings.Contains(url, "://") {
				url = "nats://" + url
			}
			if err := natsurl.Check(url); err != nil {
				return o, UsageErrorf("--%s: %w", n.name, err)
			}
			o.URLs = append(o.URLs, url)
		}
	}
	if len(o.URLs) == 0 && !n.optional {
		return o, UsageErrorf("--%s is empty", n.name)
	}
	switch {
	case o.InboxPrefix != "":
	case o.CredsFile != "":
		o.InboxPrefix = natsauth.InboxOfCreds(o.CredsFile)
	case o.NkeyFile != "":
		o.InboxPrefix = natsauth.InboxOfSeed(o.NkeyFile)
	}
	if o.InboxPrefix != "" && !strings.HasPrefix(o.InboxPrefix, jetstream.InboxRoot) {
		return o, UsageErrorf("--%s-inbox-prefix %q does not begin with %s: indexers and shims reply only to inboxes",
			n.name, o.InboxPrefix, jetstream.InboxRoot)
	}
	if (o.CertFile == "") != (o.KeyFile == "") {
		return o, UsageErrorf("--%[1]s-cert and --%[1]s-key go together", n.name)
	}
	if err := o.CheckFiles(); err != nil {
		return o, UsageErrorf("--%s: %w", n.name, err)
	}
	return o, nil
}

// Shown returns the server's addresses for messages, without secrets.
func (n *NATS) Shown() string { return natsurl.Shown(n.URL) }

// Said reports whether any of the flags has a value.
func (n *NATS) Said() bool {
	return n.URL != "" || slices.ContainsFunc(n.how, func(s *string) bool { return *s != "" })
}

// Connect connects once, to a server with JetStream. The error of an unreachable server contains its address. patience
// bounds the wait of later calls for JetStream.
func (n *NATS) Connect(ctx context.Context, name string, patience time.Duration) (*jetstream.Conn, error) {
	c, err := n.connect(ctx, name, false, patience)
	if errors.Is(err, jetstream.ErrNoLeader) {
		return nil, fmt.Errorf("this command needs JetStream; query, workers, status and cluster do not: %w", err)
	}
	return c, err
}

// ConnectCore is Connect for operations without JetStream: indexers answer requests without it.
func (n *NATS) ConnectCore(ctx context.Context, name string) (*jetstream.Conn, error) {
	return n.connect(ctx, name, true, 0)
}

// ConnectCoreAs is ConnectCore with a credentials file, unless flags select a user.
func (n *NATS) ConnectCoreAs(ctx context.Context, name, creds string) (*jetstream.Conn, error) {
	if !slices.ContainsFunc(n.how, func(s *string) bool { return *s != "" }) {
		n.options.CredsFile = creds
	}
	return n.ConnectCore(ctx, name)
}

func (n *NATS) connect(ctx context.Context, name string, core bool, patience time.Duration) (*jetstream.Conn, error) {
	o, err := n.Options(name)
	if err != nil {
		return nil, err
	}
	o.Core, o.Patience = core, patience
	c, err := jetstream.Connect(ctx, o)
	if errors.Is(err, jetstream.ErrUnavailable) && !errors.Is(err, jetstream.ErrNoLeader) {
		return nil, fmt.Errorf("no NATS server answers; start `indexer serve`, or give its address with --nats: %w", err)
	}
	return c, err
}

// Away returns the event and the remedy for the log line of a program that waits for a connection.
func (n *NATS) Away(err error) (what, todo string) {
	if errors.Is(err, jetstream.ErrNoLeader) {
		return natsauth.NoJetStream()
	}
	return "waiting for a NATS server; none answers",
		"start `indexer serve` or nats-server -js there, or give an address with --" + n.name
}

// AsyncAdvice returns the remedy for an asynchronous error of a NATS connection.
func AsyncAdvice(err error) string {
	if advice := RefusalAdvice(err); advice != "" {
		return advice
	}
	return "see the NATS server's log"
}

// RefusalAdvice returns the remedy for an error of a refused subject: the missing flag or permission. It is empty for
// other errors.
func RefusalAdvice(err error) string {
	kind, subject, ok := jetstream.RefusedSubject(err.Error())
	switch ns, named := jetstream.ParseNamespace(subject); {
	case !ok:
		return ""
	case kind == "Subscription" && strings.HasPrefix(subject, jetstream.InboxRoot):
		return "give --nats-inbox-prefix the inbox of this key: indexer auth print shows it, and the key's settings file " +
			"contains it (--config)"
	case named:
		return fmt.Sprintf("give --namespace the namespace of this key, if that is not %q; else use the key of a user with "+
			"this right (indexer auth print; docs/security.md lists the rights of each user)", ns)
	}
	return "use the key of a user with this right (indexer auth print; docs/security.md lists the rights of each user)"
}

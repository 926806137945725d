package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/spf13/pflag"
)

// NATS is the connection that a program's flags describe.
type NATS struct {
	URL      string
	name     string    // of the flags, without dashes
	how      []*string // what they say but for the address
	options  jetstream.ConnOptions
	optional bool
}

// NATSFlags adds the flags of a NATS connection. If optional is true an empty --nats is allowed and means none.
func NATSFlags(flags *pflag.FlagSet, optional bool) *NATS {
	def, usage := "nats://127.0.0.1:4222", "NATS server, or several with commas between"
	if optional {
		def, usage = "", "join this NATS server, or several with commas between, instead of running one"
	}
	return natsFlags(flags, "nats", def, usage, optional)
}

// OtherNATSFlags adds the flags of one more connection, --NAME, --NAME-creds and so on. An empty --NAME means none.
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
	text(&o.CAFile, "-ca", "", "file with the authorities that vouch for the server")
	text(&o.CertFile, "-cert", "", "file with this client's certificate")
	text(&o.KeyFile, "-key", "", "file with its key")
	text(&o.InboxPrefix, "-inbox-prefix", "",
		"first part of the subjects on which replies are taken, where permissions ask for one; it begins with _INBOX "+
			"(default: that of the key, where --"+name+"-creds or the folder of --"+name+"-nkey names it; else _INBOX)")
	return n
}

// secretVariable is the environment variable of a flag that is better not given on the command line.
func secretVariable(flag string) string {
	if name := KnownNames[flag]; name != "" {
		return name
	}
	return variable(flag)
}

// Options is what to connect with.
func (n *NATS) Options(name string) (jetstream.ConnOptions, error) {
	o := n.options
	o.Name = name
	for _, url := range strings.Split(n.URL, ",") {
		if url = strings.TrimSpace(url); url != "" {
			if !strings.Contains(url, "://") {
				url = "nats://" + url
			}
			if err := jetstream.CheckAddress(url); err != nil {
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
		return o, UsageErrorf("--%s-inbox-prefix %q does not begin with %s: indexers and shims reply to inboxes alone",
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

// Shown is the server's address, or several, as it may be shown: without secrets.
func (n *NATS) Shown() string { return jetstream.ShownAddress(n.URL) }

// Said reports whether any of the flags was given a value.
func (n *NATS) Said() bool {
	return n.URL != "" || slices.ContainsFunc(n.how, func(s *string) bool { return *s != "" })
}

// Connect connects once, to a server with JetStream; what cannot be reached is an error that names it. Patience is how
// long each later call may wait for JetStream.
func (n *NATS) Connect(ctx context.Context, name string, patience time.Duration) (*jetstream.Conn, error) {
	c, err := n.connect(ctx, name, false, patience)
	if errors.Is(err, jetstream.ErrNoLeader) {
		return nil, fmt.Errorf("this needs JetStream; query, workers, status and cluster do not: %w", err)
	}
	return c, err
}

// ConnectCore is Connect for what needs no JetStream: requests to indexers are answered without it.
func (n *NATS) ConnectCore(ctx context.Context, name string) (*jetstream.Conn, error) {
	return n.connect(ctx, name, true, 0)
}

// ConnectCoreAs is ConnectCore with a credentials file, unless flags say who connects.
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
		return nil, fmt.Errorf("no NATS server answers; start `indexer serve`, or say where it is with --nats: %w", err)
	}
	return c, err
}

// Away says, for a log line of a program that waits for a connection, what does not answer, and what to do about it.
func (n *NATS) Away(err error) (what, todo string) {
	if errors.Is(err, jetstream.ErrNoLeader) {
		return NoJetStream()
	}
	return "no NATS server answers; it is waited for",
		"start `indexer serve` or nats-server -js there, or say with --" + n.name + " where one is"
}

// NoJetStream says the same where there is a connection and JetStream does not answer.
func NoJetStream() (what, todo string) {
	return "NATS answers, but its JetStream does not; it is waited for",
		"start the NATS servers that are away: more than half of those with JetStream must be up"
}

// AsyncAdvice is what to do about an error that a NATS connection reports by itself.
func AsyncAdvice(err error) string {
	if advice := RefusalAdvice(err); advice != "" {
		return advice
	}
	return "see the NATS server's log"
}

// RefusalAdvice is what to do about an error that names a subject that the NATS server refuses: which flag is missing,
// or which right. It is empty for any other error.
func RefusalAdvice(err error) string {
	kind, subject, ok := jetstream.RefusedSubject(err.Error())
	switch ns, named := jetstream.ParseNamespace(subject); {
	case !ok:
		return ""
	case kind == "Subscription" && strings.HasPrefix(subject, jetstream.InboxRoot):
		return "give --nats-inbox-prefix the inbox of this key: indexer auth print shows it, and the settings file of the " +
			"key has it (--config)"
	case named:
		return fmt.Sprintf("give --namespace the namespace of this key, if that is not %q; else use the key of a user with "+
			"this right (indexer auth print; docs/security.md has the rights of each)", ns)
	}
	return "use the key of a user with this right (indexer auth print; docs/security.md has the rights of each)"
}

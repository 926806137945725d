package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/spf13/pflag"
)

// NATS is the connection that a program's flags describe.
type NATS struct {
	URL      string
	options  jetstream.ConnOptions
	optional bool
}

// NATSFlags adds the flags of a NATS connection. If optional is true an empty --nats is allowed and means none.
func NATSFlags(flags *pflag.FlagSet, optional bool) *NATS {
	n := &NATS{optional: optional}
	def, usage := "nats://127.0.0.1:4222", "NATS server, or several with commas between (also NATS_URL)"
	if optional {
		def, usage = "", "join this NATS server, or several with commas between, instead of running one (also NATS_URL)"
	}
	flags.StringVar(&n.URL, "nats", def, usage)
	o := &n.options
	flags.StringVar(&o.CredsFile, "nats-creds", "", "credentials file (also NATS_CREDS)")
	flags.StringVar(&o.NkeyFile, "nats-nkey", "", "file with an nkey seed (also NATS_NKEY)")
	flags.StringVar(&o.User, "nats-user", "", "user (also NATS_USER)")
	flags.StringVar(&o.Password, "nats-password", "", "password; better given as NATS_PASSWORD")
	flags.StringVar(&o.Token, "nats-token", "", "token; better given as NATS_TOKEN")
	flags.StringVar(&o.CAFile, "nats-ca", "", "file with the authorities that vouch for the server (also NATS_CA)")
	flags.StringVar(&o.CertFile, "nats-cert", "", "file with this client's certificate (also NATS_CERT)")
	flags.StringVar(&o.KeyFile, "nats-key", "", "file with its key (also NATS_KEY)")
	flags.StringVar(&o.InboxPrefix, "nats-inbox-prefix", "", "first part of the subjects on which replies are taken, where permissions ask for one (default: _INBOX)")
	return n
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
			o.URLs = append(o.URLs, url)
		}
	}
	if len(o.URLs) == 0 && !n.optional {
		return o, UsageErrorf("--nats is empty")
	}
	if (o.CertFile == "") != (o.KeyFile == "") {
		return o, UsageErrorf("--nats-cert and --nats-key go together")
	}
	return o, nil
}

// Connect connects once; what cannot be reached is an error that names it.
func (n *NATS) Connect(ctx context.Context, name string) (*jetstream.Conn, error) {
	o, err := n.Options(name)
	if err != nil {
		return nil, err
	}
	c, err := jetstream.Connect(ctx, o)
	if errors.Is(err, jetstream.ErrUnavailable) {
		return nil, fmt.Errorf("no NATS server answers at %s; start `indexer serve`, or say where it is with --nats: %w", n.URL, err)
	}
	return c, err
}

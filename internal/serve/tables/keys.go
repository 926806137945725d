package tables

import (
	"io"

	"github.com/kvatlas/kvatlas/internal/operate/upkeep"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
)

// Keys prints the result of a change of keys: the configuration of NATS servers, unescaped for a file, and the users
// with the next steps.
func Keys(servers, users io.Writer, r *upkeep.KeysResult) error {
	for _, u := range r.Users {
		cli.Fprintf(users, "%s: %s\n", u.User, u.Flags)
	}
	for _, note := range r.Notes {
		cli.Fprintln(users, note)
	}
	_, err := io.WriteString(servers, r.Config)
	return err
}

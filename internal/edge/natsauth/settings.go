package natsauth

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/nats-io/jwt/v2"
	"go.yaml.in/yaml/v3"

	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// SettingsFile returns the path of a user's settings file. Programs read the file with --config.
func (r *Ring) SettingsFile(namespace string, g *Grant) string {
	return filepath.Join(r.dir, namespace+"-"+g.User+".yaml")
}

// WriteSettings writes the settings file of a user. nats is the address of the servers; an empty address is left out.
func (r *Ring) WriteSettings(namespace, nats string, g *Grant) error {
	flag, key := r.credential(namespace, g)
	key, err := filepath.Abs(key)
	if err != nil {
		return err
	}
	settings := map[string]string{"namespace": namespace, strings.TrimPrefix(flag, "--"): key,
		"nats-inbox-prefix": g.Inbox}
	if nats != "" {
		settings["nats"] = nats
	}
	text, err := yaml.Marshal(settings)
	if err != nil {
		return err
	}
	heading := fmt.Sprintf("# Settings of the NATS user %s of namespace %s, for --config\n", g.User, namespace)
	return replaceFile(r.SettingsFile(namespace, g), append([]byte(heading), text...))
}

// removeSettings removes the settings file of a user.
func (r *Ring) removeSettings(namespace string, g *Grant) error {
	if err := os.Remove(r.SettingsFile(namespace, g)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// InboxOfCreds returns the inbox prefix that the credentials in a file permit. It is empty without a specific prefix.
func InboxOfCreds(file string) string {
	text, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	token, err := jwt.ParseDecoratedJWT(text)
	if err != nil {
		return ""
	}
	user, err := jwt.DecodeUserClaims(token)
	if err != nil {
		return ""
	}
	var inboxes []string
	for _, subject := range user.Sub.Allow {
		if prefix, ok := strings.CutSuffix(subject, ".>"); ok && strings.HasPrefix(prefix, jetstream.InboxRoot+"_") {
			inboxes = append(inboxes, prefix)
		}
	}
	if len(inboxes) != 1 {
		return ""
	}
	return inboxes[0]
}

// InboxOfSeed returns the inbox prefix of the user with the seed in a file. It reads the prefix from the roster in the
// same folder, and returns an empty prefix without a roster.
func InboxOfSeed(file string) string {
	seed, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	public, err := publicOf(file, seed)
	if err != nil {
		return ""
	}
	r, err := Open(filepath.Dir(file))
	if err != nil {
		return ""
	}
	for i := range r.Members {
		if m := &r.Members[i]; slices.Contains(m.Keys, public) {
			if g, err := r.grant(m); err == nil {
				return g.Inbox
			}
		}
	}
	return ""
}

package jetstream

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
)

// CheckFiles returns the errors of all unreadable or invalid files at once. Without it, some invalid files look like an
// unreachable server.
func (o *ConnOptions) CheckFiles() error {
	var errs []error
	if o.CredsFile != "" {
		text, err := os.ReadFile(o.CredsFile)
		if err == nil {
			_, err = nkeys.ParseDecoratedJWT(text)
		}
		if err == nil {
			_, err = nkeys.ParseDecoratedNKey(text)
		}
		errs = append(errs, about("credentials file", o.CredsFile, err))
	}
	if o.NkeyFile != "" {
		_, err := nkeyOption(o.NkeyFile)
		errs = append(errs, about("nkey file", o.NkeyFile, err))
	}
	if o.CAFile != "" {
		text, err := os.ReadFile(o.CAFile)
		if err == nil && !x509.NewCertPool().AppendCertsFromPEM(text) {
			err = errors.New("there is no certificate in it")
		}
		errs = append(errs, about("file with authorities", o.CAFile, err))
	}
	if o.CertFile != "" {
		_, err := tls.LoadX509KeyPair(o.CertFile, o.KeyFile)
		errs = append(errs, about("certificate and key", o.CertFile, err))
	}
	return errors.Join(errs...)
}

// nkeyOption returns an option with the key in a file. The seed is read once. A replacement of the file, as in a
// rotation, has an effect at the next start only, and reconnects use the old key.
func nkeyOption(path string) (nats.Option, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	pair, err := nkeys.ParseDecoratedNKey(text)
	if err != nil {
		return nil, err
	}
	public, err := pair.PublicKey()
	if err != nil {
		return nil, err
	}
	if !nkeys.IsValidPublicUserKey(public) {
		return nil, errors.New("not the seed of a NATS user")
	}
	return nats.Nkey(public, pair.Sign), nil
}

func about(what, path string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %s: %w", what, path, err)
}

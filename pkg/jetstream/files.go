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

// CheckFiles refuses files that cannot be read or are not what they should be, all of them at once. Without it what is
// wrong with some of them shows as a server that cannot be reached.
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

// nkeyOption identifies a connection by the key in a file. The seed is read once: a file that is replaced while its
// program runs, as in a rotation, takes effect with the next start, and reconnecting goes on with the key of before.
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

package harness

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Authority signs certificates for 127.0.0.1.
type Authority struct {
	File string // the certificate, PEM

	t    testing.TB
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority makes an authority with files in a temporary folder.
func NewAuthority(t testing.TB) *Authority {
	t.Helper()
	a := &Authority{t: t, dir: t.TempDir()}
	a.File = filepath.Join(a.dir, "ca.crt")
	a.cert = &x509.Certificate{Subject: pkix.Name{CommonName: "authority"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign}
	a.key = a.issue(a.cert, a.cert, nil, "ca")
	return a
}

// Issue writes a certificate of a server or a client with its key.
func (a *Authority) Issue(name string, usage x509.ExtKeyUsage) (cert, key string) {
	a.t.Helper()
	a.issue(&x509.Certificate{Subject: pkix.Name{CommonName: name}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{usage}}, a.cert, a.key, name)
	return filepath.Join(a.dir, name+".crt"), filepath.Join(a.dir, name+".key")
}

// issue signs a certificate with the parent's key, or with the new key without a parent.
func (a *Authority) issue(asked, parent *x509.Certificate, with *ecdsa.PrivateKey, name string) *ecdsa.PrivateKey {
	a.t.Helper()
	must := func(err error) {
		a.t.Helper()
		if err != nil {
			a.t.Fatal(err)
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	if with == nil {
		with = key
	}
	asked.SerialNumber, err = rand.Int(rand.Reader, big.NewInt(1<<62))
	must(err)
	asked.NotBefore, asked.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, asked, parent, &key.PublicKey, with)
	must(err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	must(err)
	for file, block := range map[string]*pem.Block{name + ".crt": {Type: "CERTIFICATE", Bytes: der},
		name + ".key": {Type: "PRIVATE KEY", Bytes: keyDER}} {
		must(os.WriteFile(filepath.Join(a.dir, file), pem.EncodeToMemory(block), 0o600))
	}
	return key
}

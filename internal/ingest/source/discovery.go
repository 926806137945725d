package source

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/usage"
	"github.com/kvatlas/kvatlas/internal/ingest/dynamo"
	"github.com/kvatlas/kvatlas/internal/ingest/etcd"
	"github.com/kvatlas/kvatlas/internal/ingest/kube"
)

// Etcd configures the connection to etcd. CA, Cert and Key are files.
type Etcd struct{ User, Password, CA, Cert, Key string }

// etcdURLs returns the addresses of etcd in --engine; nil if --engine is no address.
func etcdURLs(engine string) (urls []string) {
	if !strings.HasPrefix(engine, "http://") && !strings.HasPrefix(engine, "https://") {
		return nil
	}
	for u := range strings.SplitSeq(engine, ",") {
		urls = append(urls, strings.TrimSpace(u))
	}
	return urls
}

// kubernetesNamespace parses an --engine of the form kubernetes or kubernetes://NAMESPACE.
func kubernetesNamespace(engine string) (namespace string, is bool) {
	if engine == "kubernetes" {
		return kube.OwnNamespace(), true
	}
	namespace, is = strings.CutPrefix(engine, "kubernetes://")
	return namespace, is && namespace != ""
}

// Check checks the settings for a source at engine, and reads the files.
func (e *Etcd) Check(wrong *usage.Complaints, source, engine string) {
	urls := etcdURLs(engine)
	if source != ZeroMQ || urls == nil {
		wrong.When(*e != Etcd{}, "the flags --etcd-... are for --source %s with --engine http://HOST:PORT",
			ZeroMQ)
		return
	}
	wrong.When((e.Cert == "") != (e.Key == ""), "--etcd-cert and --etcd-key go together")
	wrong.When(e.User == "" && e.Password != "", "--etcd-password goes with --etcd-user")
	_, err := e.open(urls)
	if errors.Is(err, etcd.ErrUserInURL) {
		err = fmt.Errorf("%w; give these as --etcd-user and KVATLAS_ETCD_PASSWORD", err)
	}
	wrong.About("--engine", err)
}

// open returns an empty copy of Dynamo's records in etcd. Run fills the copy.
func (e *Etcd) open(urls []string) (*dynamo.Etcd, error) {
	cfg := dynamo.EtcdConfig{URLs: urls, User: e.User, Password: e.Password, TLS: &tls.Config{}}
	if e.CA != "" {
		text, err := os.ReadFile(e.CA)
		if err != nil {
			return nil, err
		}
		cfg.TLS.RootCAs = x509.NewCertPool()
		if !cfg.TLS.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("--etcd-ca %s: %w", e.CA, errors.New("there is no certificate in it"))
		}
	}
	if e.Cert != "" && e.Key != "" {
		load := func() (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(e.Cert, e.Key)
			return &pair, err
		}
		if _, err := load(); err != nil {
			return nil, fmt.Errorf("--etcd-cert %s: %w", e.Cert, err)
		}
		// every connection reads the files, since certificates are renewed
		cfg.TLS.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return load() }
	}
	return dynamo.NewEtcd(cfg)
}

// discovery lists the publishers of a fleet.
type discovery struct {
	publishers func() (list []dynamo.Publisher, wrong []error, err error)
	advice     string // remedy if the list cannot be read
	empty      string // remedy if the list is empty
}

// discover starts to read the discovery of --engine.
func (f *Source) discover() (d discovery, err error) {
	urls := etcdURLs(f.Engine)
	if namespace, is := kubernetesNamespace(f.Engine); is {
		client, err := kube.New(f.Kube)
		if err != nil {
			return d, err
		}
		d.advice = "check the API server, and the right of this service account to list and watch dynamoworkermetadatas of " +
			"nvidia.com; known publishers stay connected meanwhile"
		copied := dynamo.NewKubernetes(client, namespace, func(err error) {
			f.full.WarnTo(f.log, "Dynamo's discovery cannot be read", "error", err, "what_to_do", d.advice)
		})
		f.all.Go(func() error {
			copied.Run(f.ctx)
			return nil
		})
		d.publishers = copied.Publishers
		d.empty = "check the namespace of the workers in --engine, and event_plane zmq in their settings"
		return d, nil
	}
	if urls == nil {
		d.publishers = func() ([]dynamo.Publisher, []error, error) { return dynamo.Publishers(f.Engine, time.Now()) }
		d.advice = "check that --engine is the DYN_FILE_KV of the workers, and readable"
		d.empty = "check that --engine is the DYN_FILE_KV of the workers, and event_plane zmq in their settings"
		return d, nil
	}
	etcd, err := f.Etcd.open(urls)
	if err != nil {
		return d, err
	}
	f.all.Go(func() error {
		etcd.Run(f.ctx)
		return nil
	})
	d.publishers = etcd.Publishers
	d.advice = "check etcd, the ETCD_ENDPOINTS of the workers in --engine, and the rights of --etcd-user; " +
		"known publishers stay connected meanwhile"
	d.empty = "check the ETCD_ENDPOINTS of the workers in --engine, and event_plane zmq in their settings"
	return d, nil
}

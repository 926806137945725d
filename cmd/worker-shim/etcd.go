package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/ingest/dynamo"
	"github.com/kvatlas/kvatlas/internal/ingest/etcd"
	"github.com/kvatlas/kvatlas/internal/ingest/kube"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
)

// etcdFlags are how etcd is spoken with.
type etcdFlags struct{ user, password, ca, cert, key string }

func addEtcdFlags(f *pflag.FlagSet) *etcdFlags {
	e := &etcdFlags{}
	f.StringVar(&e.user, "etcd-user", "", "of dynamo-zmq: etcd's user, who may read the keys from v1/event_ on")
	f.StringVar(&e.password, "etcd-password", "", "password; better given as KVATLAS_ETCD_PASSWORD")
	f.StringVar(&e.ca, "etcd-ca", "", "file with the authorities that vouch for etcd")
	f.StringVar(&e.cert, "etcd-cert", "", "file with this client's certificate")
	f.StringVar(&e.key, "etcd-key", "", "file with its key")
	return e
}

// etcdURLs are those in --engine; empty if it is a folder.
func etcdURLs(engine string) (urls []string) {
	if !strings.HasPrefix(engine, "http://") && !strings.HasPrefix(engine, "https://") {
		return nil
	}
	for u := range strings.SplitSeq(engine, ",") {
		urls = append(urls, strings.TrimSpace(u))
	}
	return urls
}

// kubernetesNamespace reads an --engine that is kubernetes or kubernetes://NAMESPACE.
func kubernetesNamespace(engine string) (namespace string, is bool) {
	if engine == "kubernetes" {
		return kube.OwnNamespace(), true
	}
	namespace, is = strings.CutPrefix(engine, "kubernetes://")
	return namespace, is && namespace != ""
}

// check refuses flags that make no sense.
func (e *etcdFlags) check(wrong *cli.Complaints, source, engine string) {
	urls := etcdURLs(engine)
	if source != sourcePlane || urls == nil {
		wrong.When(*e != etcdFlags{}, "--etcd-user and what begins so are for --source %s with --engine http://HOST:PORT",
			sourcePlane)
		return
	}
	wrong.When((e.cert == "") != (e.key == ""), "--etcd-cert and --etcd-key go together")
	wrong.When(e.user == "" && e.password != "", "--etcd-password goes with --etcd-user")
	_, err := e.open(urls)
	if errors.Is(err, etcd.ErrUserInURL) {
		err = fmt.Errorf("%w; give these as --etcd-user and KVATLAS_ETCD_PASSWORD", err)
	}
	wrong.About("--engine", err)
}

// open makes a copy of what is in etcd.
func (e *etcdFlags) open(urls []string) (*dynamo.Etcd, error) {
	cfg := dynamo.EtcdConfig{URLs: urls, User: e.user, Password: e.password, TLS: &tls.Config{}}
	if e.ca != "" {
		text, err := os.ReadFile(e.ca)
		if err != nil {
			return nil, err
		}
		cfg.TLS.RootCAs = x509.NewCertPool()
		if !cfg.TLS.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("--etcd-ca %s: %w", e.ca, errors.New("there is no certificate in it"))
		}
	}
	if e.cert != "" && e.key != "" {
		load := func() (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(e.cert, e.key)
			return &pair, err
		}
		if _, err := load(); err != nil {
			return nil, fmt.Errorf("--etcd-cert %s: %w", e.cert, err)
		}
		// read with every connection: certificates are renewed
		cfg.TLS.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return load() }
	}
	return dynamo.NewEtcd(cfg)
}

// discovery is where the publishers of a fleet are looked up.
type discovery struct {
	publishers func() (list []dynamo.Publisher, wrong []error, err error)
	advice     string // if it cannot be read
	nobody     string // if it names nobody
}

// discover begins to look where --engine says.
func (f *fleet) discover() (d discovery, err error) {
	urls := etcdURLs(f.cfg.engine)
	if namespace, is := kubernetesNamespace(f.cfg.engine); is {
		client, err := kube.New(f.cfg.kube)
		if err != nil {
			return d, err
		}
		d.advice = "see that the API server runs, and that this service account may list and watch dynamoworkermetadatas of " +
			"nvidia.com; publishers that are known are heard meanwhile"
		copied := dynamo.NewKubernetes(client, namespace, func(err error) {
			f.full.warn(f.log, "Dynamo's discovery cannot be read", "error", err, "what_to_do", d.advice)
		})
		f.all.Go(func() error {
			copied.Run(f.ctx)
			return nil
		})
		d.publishers = copied.Publishers
		d.nobody = "see that --engine has the namespace of the workers, and that they run with event_plane zmq"
		return d, nil
	}
	if urls == nil {
		d.publishers = func() ([]dynamo.Publisher, []error, error) { return dynamo.Publishers(f.cfg.engine, time.Now()) }
		d.advice = "see that --engine is the DYN_FILE_KV of the workers, and can be read"
		d.nobody = "see that --engine is the DYN_FILE_KV of the workers, and that they run with event_plane zmq"
		return d, nil
	}
	etcd, err := f.cfg.etcd.open(urls)
	if err != nil {
		return d, err
	}
	f.all.Go(func() error {
		etcd.Run(f.ctx)
		return nil
	})
	d.publishers = etcd.Publishers
	d.advice = "see that etcd runs, that --engine has the ETCD_ENDPOINTS of the workers, and what --etcd-user may read; " +
		"publishers that are known are heard meanwhile"
	d.nobody = "see that --engine has the ETCD_ENDPOINTS of the workers, and that they run with event_plane zmq"
	return d, nil
}

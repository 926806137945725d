package server

import (
	"crypto/x509"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/faces/externalmetrics"
)

// ExternalMetrics configures the port of Kubernetes' external metrics. The port needs HTTPTLS.
type ExternalMetrics struct {
	Listen      string         // empty disables the port
	Authorities *x509.CertPool // of the client certificate of the API server
	Clients     []string       // permitted common names in the certificate
}

// externalMetrics returns the port of Kubernetes' external metrics. It has no routes with roles: the TLS handshake
// admits only API servers, which check the permissions of their clients.
func (s *Server) externalMetrics() web.Face {
	return web.Face{Listen: s.ExternalMetrics.Listen, Flag: "--external-metrics-listen",
		What: "the external metrics API of Kubernetes",
		TLS:  externalmetrics.Secure(s.HTTPTLS, s.ExternalMetrics.Authorities, s.ExternalMetrics.Clients),
		Handler: externalmetrics.Handler(externalmetrics.Config{Models: s.modelsWithWorkers, Scaling: s.Scaling,
			Now: time.Now, Ended: s.endedHTTP})}
}

// modelsWithWorkers returns the models in order. An error means that the list is not complete yet.
func (s *Server) modelsWithWorkers() (list []string, err error) {
	for _, p := range s.registry.Pools() {
		list = append(list, p.Model)
	}
	return list, s.admitChoice()
}

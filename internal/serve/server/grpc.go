package server

import (
	"crypto/tls"
	"fmt"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/kvatlas/kvatlas/internal/edge/grpcserver"
	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/internal/faces/gateway"
	"github.com/kvatlas/kvatlas/internal/faces/kvindexer"
	"github.com/kvatlas/kvatlas/internal/faces/kvindexer/kvindexerpb"
	"github.com/kvatlas/kvatlas/pkg/api"
	"google.golang.org/grpc"
)

// streamsPerCall is the number of open streams over gRPC for every permitted call. A gateway's stream lives as long as
// its request and is idle most of the time.
const streamsPerCall = 8

// grpcNeeds are the permitted roles of every method. All clients may use grpc.health.v1.
var grpcNeeds = map[string]rights.Roles{
	extprocv3.ExternalProcessor_Process_FullMethodName:         rights.Route,
	kvindexerpb.KVIndexer_MatchExternalKvPrefix_FullMethodName: rights.Read,
}

// grpcTLS returns the TLS configuration of the gRPC port; nil for plain text.
func (s *Server) grpcTLS() *tls.Config {
	if s.GRPCClientCAs == nil {
		return s.HTTPTLS
	}
	with := s.HTTPTLS.Clone()
	with.ClientCAs, with.ClientAuth = s.GRPCClientCAs, tls.VerifyClientCertIfGiven
	return with
}

// The values of Settings.GatewayPrefill.
const (
	PrefillBySidecar = "sidecar"
	PrefillByVLLM    = "vllm"
)

// transfer returns the configuration of the gateway's own requests to prefill workers; nil: others send them.
func (s *Server) transfer() *gateway.Transfer {
	if s.GatewayPrefill != PrefillByVLLM {
		return nil
	}
	return &gateway.Transfer{Rule: s.Screen.Rule, Timeout: s.GatewayPrefillTimeout}
}

// serveGRPC listens and serves gRPC until the returned function is called.
func (s *Server) serveGRPC() (stop func(), err error) {
	calls := s.QueryWorkers + s.QueryQueue
	var open []string
	if s.GRPCInsecure {
		open = []string{extprocv3.ExternalProcessor_Process_FullMethodName}
	}
	stop, at, err := grpcserver.Serve(s.GRPCListen, grpcserver.Config{
		Tokens: s.HTTPTokens, Needs: grpcNeeds, Open: open, TLS: s.grpcTLS(), Calls: calls, Streams: streamsPerCall * calls,
		Ready:    s.admitChoice,
		Ended:    func(method, outcome string) { s.outcomes.Count(api.OverGRPC, method, outcome) },
		Panicked: s.panicked,
		Tracer:   s.Tracer,
	}, func(r grpc.ServiceRegistrar) {
		extprocv3.RegisterExternalProcessorServer(r, gateway.New(gateway.Config{
			Select: s.tracedSelect, Bookings: s, Pool: s.registry.Pool, All: s.registry.All, Resolve: s.registry.Resolve,
			MaxBodies: maxBodies, Text: s.tokenizers != nil, ByLoad: s.warnOfText, Templates: s.RequestTemplates,
			Bind: s.bindSession(), Metrics: measured{s.queries, s}, Expiry: s.RequestExpiry,
			ForwardTokens: s.ForwardTokens, Estimates: &s.estimates, Transfer: s.transfer(), Tenants: s.tenants,
		}))
		kvindexerpb.RegisterKVIndexerServer(r, kvindexer.New(kvindexer.Config{Find: s.tracedFind, Pools: s.registry.Pools}))
	})
	if err != nil {
		return nil, fmt.Errorf("gRPC: %w; choose another with --grpc-listen", err)
	}
	s.log.Info("gRPC is served", "listen", at.String())
	if s.GRPCInsecure {
		s.log.Warn("all clients of this port may select workers without a token", "listen", at.String(), "what_to_do",
			"let a NetworkPolicy or firewall admit only the gateways, as networkPolicy.grpcFrom of the chart does")
	}
	return stop, nil
}

// Package gateway chooses workers for proxies with the Gateway API's Endpoint Picker Protocol 1.0.0: Envoy and the
// gateways built on Envoy. It implements envoy.service.ext_proc.v3.ExternalProcessor:
//
//	picker := gateway.New(gateway.Config{Select: router.Select, Bookings: router, Pool: registry.Pool, All: registry.All,
//		Metrics: metrics})
//	extprocv3.RegisterExternalProcessorServer(registrar, picker)
//
// A stream is one HTTP request. A [Machine] decides the effects of each message, and [Service.Process] executes them:
//
//	proxy                             Machine                     effects
//	request headers, body, trailers → begin, reading, choosing  → Ask: choose a worker for the request
//	                                ← headers with x-gateway-destination-endpoint, body
//	response headers                → waiting                   → Served: the answering worker, if not the chosen one
//	response body, trailers         → answering                 → PrefillComplete at the first bytes, Free at the end
//	the end of the stream           → over                      → Free, unless it was freed
//
// While a stream is open, the service also reports progress of the request, so that the booking does not expire.
//
// The body is read completely before the choice, in the modes BUFFERED and FULL_DUPLEX_STREAMED. A proxy that does not
// report its mode is assumed to use the latter. Bodies in FULL_DUPLEX_STREAMED are sent in chunks of 62 KB.
//
// In a fleet with decode workers, a request of a generating API has a prefill worker too. The decode worker gets the
// request, with the prefill worker's address in the header of llm-d's routing sidecar. For SGLang, the body has the
// fields of SGLang's router. The bookings on both workers have one id, and end with the request. With [Transfer], the
// service sends the request to a prefill worker of vLLM itself, before the choice is returned to the proxy, and gives
// the description of the transfer to the decode worker. The prefill booking ends with this request.
//
// The session of a request is the body's previous_response_id. No header names a session.
//
// Workers are identified by the serving addresses of their records, as IP:PORT. Workers with other addresses cannot be
// chosen.
package gateway

// Package gateway chooses workers for proxies that speak the Gateway API's Endpoint Picker Protocol 1.0.0: Envoy and
// the gateways built on it. It is an envoy.service.ext_proc.v3.ExternalProcessor:
//
//	picker := gateway.New(gateway.Config{Select: router.Select, Bookings: router, Pool: registry.Pool, All: registry.All})
//	extprocv3.RegisterExternalProcessorServer(registrar, picker)
//
// A stream is one HTTP request. A [Machine] decides what follows each of its messages, and [Service.Process] does it:
//
//	proxy                             Machine                     effects
//	request headers, body, trailers → begin, reading, choosing  → Ask: a worker is chosen and the request booked there
//	                                ← headers with x-gateway-destination-endpoint, body
//	response headers                → waiting                   → Served: who really answered, if it is another
//	response body, trailers         → answering                 → PrefillComplete at the first bytes, Free at the end
//	the end, wherever it comes      → over                      → Free, unless it was freed
//
// The body is read whole before the choice, in the modes BUFFERED and FULL_DUPLEX_STREAMED; a proxy that does not say
// its mode is taken to use the latter. What is sent in FULL_DUPLEX_STREAMED is cut into chunks of 62 KB.
//
// Workers are known by the serving addresses of their records, as IP:PORT; others cannot be chosen.
package gateway

// Package faces serves the protocols of other projects, for clients that were written for these.
//
//   - compat serves the HTTP interface of Dynamo's indexer (RFC #1403); its subpackages serve Mooncake's conductor and
//     Dynamo's selection service and slot tracker
//   - externalmetrics serves the waiting work to Kubernetes' API server, for autoscalers
//   - gateway chooses workers for Envoy and the gateways built on it (ext_proc)
//   - kvindexer serves the protocol with which SGLang's router asks an index
package faces

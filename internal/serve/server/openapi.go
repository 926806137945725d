package server

import _ "embed"

// openAPI describes the HTTP port in OpenAPI 3.1: the paths of the API, health and metrics. A test generates the
// document from the Go types, their comments and the readers of requests, and fails if the document differs.
//
//go:generate go test -run TestOpenAPI -update .
//go:embed openapi.json
var openAPI []byte

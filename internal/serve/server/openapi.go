package server

import _ "embed"

// openAPI describes the HTTP port in OpenAPI 3.1: the paths of the API, health and metrics. A test makes it of the Go
// types, their comments and what the readers of requests take, and fails where it says something else.
//
//go:generate go test -run TestOpenAPI -update .
//go:embed openapi.json
var openAPI []byte

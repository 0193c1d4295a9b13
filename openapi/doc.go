// Package openapi holds the contract of the REST interface and serves it: the
// OpenAPI 3.1 document as JSON and YAML, the Swagger explorer, and a light
// reference page that works without JavaScript.
//
// The document is generated from the annotations of the handlers by
// "go run ./openapi/gen". The explorer is a vendored Swagger UI that works
// without any other host.
package openapi

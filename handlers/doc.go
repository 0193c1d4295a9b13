// Package handlers serves Headgate's REST interface: it decodes requests,
// calls the services of tasks, fleet and auth, and encodes their answers. It
// knows no SQL and no gRPC.
//
// Every route stands in the one table of routes.go with its permission and
// the query parameters that it accepts. Every error leaves through errors.go
// as a problem document (RFC 9457), the router's own included.
//
//	@title			Headgate
//	@version		1
//	@description	Runs tasks on a fleet of agents, safely, from one place. All times are RFC 3339 in UTC, ids of tasks are decimal strings, and every error is a problem document with a stable code, a request id and a hint.
//	@servers.url	/
package handlers

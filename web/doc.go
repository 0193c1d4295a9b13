// Package web is the dashboard: pages rendered on the server, readable and
// usable without JavaScript, made live by htmx and one event stream per tab.
// It speaks to the same services as the REST handlers and adds nothing that
// REST could not do.
//
// The parts, each in the file of its name: web.go (configuration, routes),
// render.go and format.go (templates and how values are written), assets.go
// (embedded files under hashed names), one file per page, form.go (forms from
// JSON schemas), output.go and ansi.go (what programs printed, which is
// hostile input), words.go (the sentences).
//
// It knows no SQL and no gRPC. It trusts its caller to have put the principal
// into the request's context (auth.Middleware) and to have refused cross-site
// writes; what a principal may do it checks itself, for every page and form.
package web

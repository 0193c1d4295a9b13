// Package controller is the composition root of `headgate serve`: the
// configuration, the start-up phases, the supervisor that starts and stops the
// long-running parts in order, the readiness conditions behind /readyz, and the
// gate that decides whether the controller is fit to serve the public.
// It is the only package that knows all parts; it holds no rules of the domain.
package controller

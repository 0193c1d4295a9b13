// Package fleettest provides what tests around internal/fleet need: an
// in-memory fleet.Store, a scripted agent that speaks the real protocol over
// real mutual TLS, and a queue that writes down what it is told.
package fleettest

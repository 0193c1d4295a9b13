// Package tasktest helps to test the queue: an in-memory Store and a scripted
// Runner, both complete enough for hours of simulated time, and the suites that
// every Store and every Runner must pass.
//
// It is imported by tests only.
package tasktest

// Package testkit provides what tests of several packages share: a private
// PostgreSQL cluster for each test process with a fresh database for each
// test, and a proxy that breaks connections at chosen moments.
//
// A package that uses it says
//
//	func TestMain(m *testing.M) { testkit.Main(m) }
//
// so that the cluster is removed and leaked goroutines are found. It is never
// part of a program that is shipped.
package testkit

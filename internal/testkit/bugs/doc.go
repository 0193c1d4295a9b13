// Package bugs holds deliberately broken variants of the product, and shows that
// each of them is caught: a checker that has never failed proves nothing.
//
// A bug is a file bug_*.txt: a sentence, the source file, the tests that must
// fail (arguments of go test), and a text of the source with what stands in its
// place. It is built by `go test -overlay`, so that no source that is shipped
// has a hole in it, not even behind a build tag. `make bugs` tries all of them.
package bugs

// Package headgate holds nothing but the tests of the module's structure
// (arch_test.go). Start reading at docs/architecture.md.
package headgate

// Package tasks is Headgate's domain: what a task is, and the one writer that
// moves it from new over waiting-for-agent-response to completed.
//
// The parts, each in the file of its name:
//
//   - Service takes submissions, cancels, reads and waits from people and programs.
//   - Manager owns the shards of this controller. One write loop takes whatever
//     has arrived (submissions, results, output, claims) through one transaction
//     at a time, the turn, and hands tasks to agents only after its commit.
//   - Hub tells waiters and event streams, after the commit.
//   - Store and Runner are the two ports: the queue on disk and the agents. Each
//     has two real implementations that pass one conformance suite.
//
// The package knows no SQL, no gRPC and no HTTP.
package tasks

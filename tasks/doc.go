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
//   - Sessions is what the fleet tells the queue; Manager implements it.
//
// One pass of a write loop, in this order: what has arrived changes memory
// (events.go, reconcile.go); the sweep, once a second (sweep.go); the turn is
// planned (plan.go) and committed (commit.go); memory follows what was written,
// and only then agents, submitters, waiters and streams hear of it (settle.go).
// Memory holds nothing that the tables do not: a shard that is lost, or that
// differs from the tables, is forgotten and read again.
//
// Three kinds of failure of a commit are told apart: fenced (a lease is lost:
// the shard is forgotten), unknown (read back before anything else) and data
// that the database refuses (the turn is halved until the bad item stands
// alone). Everything else wrote nothing and is tried again.
//
// The package knows no SQL, no gRPC and no HTTP.
package tasks

// Package agent provides the agent's side of Headgate: it waits for a
// controller of its fleet, executes one task at a time as far as its policy
// allows, and remembers in its ledger what it has done. It knows nothing of
// the controller's queue and never dials anybody.
//
// # Data directory
//
//	lock          held while an agent runs: one process an identity
//	identity.pem  key and self-made certificate, made at the first start
//	fleet/        key, certificate and authorities of the fleet, after pairing
//	pairing.json  failed tries of the enrolment token
//	epochs.json   highest epoch seen of the shard
//	ledger        see internal/agent/ledger
//	program.json  the program that runs, so that the next start finds what is left of it
//	agent.json    id, address, pid of the running agent; gone after a clean end
//
// # The slot
//
// All that decides about tasks happens under one lock, in type slot: opening a
// session (storing the epoch and ending the older session), starting a task,
// finishing it, forgetting it. A message starts something only while its
// session is the current one under that lock, so nothing read from an older
// stream can start anything once a newer Welcome has been built.
//
// The slot is taken from the acceptance of a task until its Final has been
// handed to a session. Output that was not acknowledged when a session ends is
// kept and sent again on the next one, where the task counts as running until
// its Final has followed.
package agent

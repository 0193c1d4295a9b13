// Package ledger provides the agent's durable record of task ids, starts and
// results: what lets a task have its effect once although any process may die
// at any moment. It knows nothing of gRPC, of kinds or of what a result means;
// a result is bytes to it.
//
// # File
//
// One append-only file: a header (magic, ledger id, time, checksum), then
// records. A record is a head of 12 bytes (length of the payload, CRC32C of
// the payload, CRC32C of those eight bytes), the payload, and one byte that is
// never zero. The head has its own checksum so that a damaged length is not
// mistaken for a torn end, and the last byte tells a complete record from one
// whose end the file system has filled with zeros.
//
// A torn end - the last record is incomplete, or zeros reach into it - comes
// from a crash during the write; it is cut off and reported. Anything else
// that does not fit is damage: Open refuses, because starting without a record
// that was on disk could run a task a second time.
//
// # Entries
//
// An entry is live from the moment its task is accepted until the controller
// has forgotten it, and is never evicted before; when too many are live, Accept
// refuses. Forgotten entries stay, without their results, as the record of
// order and as the memory of ids that must not run again: the newest 100,000
// (the agreed least is 10,000 or 7 days; count alone bounds the memory, about
// 20 MB). Orders count all accepts and finishes over the life of the ledger,
// restarts included, so that entries of one agent can be checked for order and
// for overlap without trusting a clock.
package ledger

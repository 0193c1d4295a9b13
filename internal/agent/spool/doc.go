// Package spool keeps what one task prints until the controller has it: in
// files, so that neither a slow controller nor one that is away blocks the
// program or fills the memory, and bounded, so that no program fills the disk.
//
// Of an output that is larger than its limit the first half and the last half
// are kept, and the middle is dropped as it passes: how it began and how it
// ended is what people look for. The first half is handed out while the program
// runs; the last half can only be known, and so is handed out, when it has
// ended. Every byte is counted, kept or not.
//
// What is kept is cut into chunks once, when they are written or handed out for
// the first time, and never otherwise: a chunk that is sent again is the same,
// also after a restart. A chunk says where in its stream it begins, so whatever
// is missing before it shows. An empty chunk says that its stream goes on
// there, where no byte of it was kept.
//
// # Files
//
// A task has a folder, named after its id, its attempt and its limit. In it are
// segments of about 1 MiB, of records with a checksum each. A segment whose
// chunks were all acknowledged is removed. A record that cannot be written,
// because the disk is full, is dropped and counted; the program runs on. Nothing
// is synced: after a power cut the task was interrupted, and its output ends
// where the records cease to be whole.
package spool

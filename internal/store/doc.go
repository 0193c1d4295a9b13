// Package store keeps everything of Headgate in PostgreSQL: all SQL of the
// product is here and nowhere else. *DB implements tasks.Store, fleet.Store
// and auth.Store, and knows the controllers that share the database.
//
// Writes go through one function, DB.write (or DB.Turn for the queue), because
// an autocommit write through database/sql may be executed twice when the
// connection ends after the statement has committed. A commit whose answer was
// lost is settled by asking the server before anything is said to the caller.
//
// It decides nothing about tasks, agents or permissions, and it does not start
// goroutines except inside Notifier.Run.
package store

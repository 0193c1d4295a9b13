// Package migrations holds the numbered SQL files of Headgate's schema and
// brings a database to their newest version. Several controllers may start it
// at once: a session lock lets one work and the others wait.
//
// It knows only database/sql; the caller opens the connection.
package migrations

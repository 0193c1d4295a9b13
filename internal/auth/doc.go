// Package auth says who is calling and what they may do: users, sessions,
// API tokens, one-time sign-in links, permissions, and the HTTP middleware
// that puts a Principal into the request's context.
//
// Secrets are never stored: the database holds SHA-256 hashes of 256-bit
// random values. Store is its port to the database.
package auth

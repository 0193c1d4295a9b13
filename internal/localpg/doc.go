// Package localpg provides a private PostgreSQL cluster for `headgate up` and
// for tests: it finds (or installs) the server's programs, makes the cluster,
// starts it as a child of this process, takes over whatever a killed
// predecessor left behind, and stops it cleanly.
//
// The cluster is private in the strict sense: it listens on a unix socket in
// a directory of mode 0700 and never on TCP, and pg_hba.conf admits one role
// by peer authentication alone. Durability settings are pinned on. The data
// is never wiped, whatever is found in the directory.
//
// The package does not know Headgate's schema, does not pool connections, and
// does not restart a server that ends by itself: whoever called Start watches
// Done and decides. It works on Linux, where /proc and the parent-death signal
// exist.
//
// What lies where, for Config.Dir = D (or its substitute, see Cluster.Dir):
//
//	D         the data directory of PostgreSQL, owned by the server's user
//	D.lock    the lock that lets one process at a time start D
//	D.run     the directory of the unix socket; replaced by a short hashed
//	          directory when its name would pass the limit of socket paths
//	D.tmp     a cluster that is being made; renamed to D when complete
package localpg

// Command bench measures Headgate and, in the same run and on the same machine,
// what it is compared with. It starts the real programs: bin/headgate with its
// private PostgreSQL cluster, and a simulator process that is hundreds or
// thousands of agents, each with its own certificate and address, enrolled by
// the real pairing protocol.
//
// Standard output holds one figure a line, BENCH <name> <value> <unit> or
// RATIO <name> <value>, and lines that begin with # beside them: the machine,
// the durability settings, the commands compared with and the single rounds.
// docs/performance.md says what each figure means.
//
// There is one file per benchmark; table in main.go lists them.
package main

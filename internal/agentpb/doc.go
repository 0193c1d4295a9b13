// Package agentpb holds the protocol between controller and agent: agent.proto
// and the code generated from it by `make generate`. It has no other code.
package agentpb

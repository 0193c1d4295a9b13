// Package fleet is the controller's side of the agents: the registry of who
// is enrolled, the AgentsMap of live connections keyed by agent id, dialling,
// health, pairing, and the hand-over of tasks to sessions (tasks.Runner).
//
// It knows no SQL (Store is its port to the database) and no HTTP.
package fleet

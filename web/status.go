package web

import "time"

// Status is the controller as the pages show it.
type Status struct {
	Name    string // of the controller
	Version string
	Began   time.Time // of the process
	Ready   bool      // the public port is open
	Since   time.Time // when it became ready, or when the present phase began
	Phase   string    // the one that is under way; "" or "serving" when ready
	Phases  []Phase   // those that are done, in order
	Ports   []Port
	Unmet   []Unmet
	Notes   []string // sentences about the database that an operator should read
	// Listener is nil before there is one.
	Listener *Listener
}

// Phase is a start-up phase that is done.
type Phase struct {
	Name string
	Took time.Duration
}

// Port is one of the two ports.
type Port struct {
	Name      string // "Controller" or "Public"
	Addresses []string
	Open      bool
	Conns     int
	Classes   []ClassConns // of which
	Note      string       // for example "never limited"
}

// ClassConns counts the connections of one class.
type ClassConns struct {
	Class string
	Count int
}

// Unmet is a condition that the controller waits for.
type Unmet struct {
	Condition string // stable code
	Detail    string // sentence
}

// phaseNames are all phases in their order, with what each does.
func phaseNames() []struct{ name, text string } {
	return []struct{ name, text string }{
		{"parse", "Reads the configuration."},
		{"open", "Locks the data directory and loads keys and certificates."},
		{"bind", "The controller port accepts; the public port is reserved and refuses."},
		{"database", "Connects to PostgreSQL and brings its schema up to date."},
		{"join", "Takes its shards, looks through the queue and calls itself."},
		{"open public", "Opens the public port after a short wait, then slowly up to the full rate."},
	}
}

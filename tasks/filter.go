package tasks

import "time"

// Filter is the one grammar of lists: page addresses, REST, and exports use
// the same names. The zero value asks for the newest tasks.
type Filter struct {
	States        []State
	Outcomes      []Outcome
	Agents        []AgentNum // resolved from ids and names by the caller
	Kinds         []string
	Query         string // prefix of id, agent name or kind; never args
	CreatedAfter  time.Time
	CreatedBefore time.Time
	Labels        map[string]string // of the agent
	Ascending     bool              // sort=id; otherwise newest first (sort=-id)
	Limit         int               // 1..MaxPage (a Store takes one more), 0 = DefaultPage
	After         ID                // keyset cursor: continue after this id; 0 = from the start
}

// Page sizes of lists.
const (
	DefaultPage = 50
	MaxPage     = 500 // larger pages cost the browser more than the database
)

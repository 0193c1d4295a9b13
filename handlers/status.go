package handlers

import (
	"net/http"
	"time"
)

// Status is how this controller stands.
type Status struct {
	Phase       string           `json:"phase" enums:"bind,database,join,open public,serving,drain"` // of the start or the end
	Since       time.Time        `json:"since"`                                                      // of this phase
	Ready       bool             `json:"ready"`                                                      // the public port is open
	Unmet       []UnmetCondition `json:"unmet"`                                                      // what it waits for
	StartedAt   time.Time        `json:"started_at"`                                                 // of the process
	Version     Version          `json:"version"`
	Controller  ControllerRef    `json:"controller"`
	Ports       Ports            `json:"ports"`
	Database    DatabaseStatus   `json:"database"`
	Checks      []Check          `json:"checks"`       // of the stability gate; none until the controller has joined
	ShardsOwned []int            `json:"shards_owned"` // of 16 groups of agents
} //	@name	Status

// ControllerRef names a controller.
type ControllerRef struct {
	ID   string `json:"id"`
	Name string `json:"name"`
} //	@name	ControllerRef

// Ports are the real addresses of the two ports.
type Ports struct {
	Controller []string   `json:"controller"`
	Public     []string   `json:"public"`
	PublicOpen bool       `json:"public_open"`
	State      string     `json:"state" enums:"starting,controller-only,settling,open,shedding,reclosed,public-failed,draining,closed"` // of the listener
	Since      time.Time  `json:"since"`                                                                                                // of that state
	Reason     string     `json:"reason"`                                                                                               // of that state
	OpensAt    *time.Time `json:"opens_at"`                                                                                             // of the public port, when planned
	Error      *string    `json:"error"`                                                                                                // why the public port could not be opened

	ControllerConns int    `json:"controller_conns"`                       // held now
	PublicConns     int    `json:"public_conns"`                           // held now
	Waiting         int    `json:"waiting"`                                // connections that wait to be let in to the public port
	LimitMode       string `json:"limit_mode" enums:"enforce,observe,off"` // of the limits of the public port
} //	@name	Ports

// Check is one thing that must hold for the public port to stay open.
type Check struct {
	Name   string     `json:"name" enums:"database,self_call,descriptors,memory,scheduler,outbound"`
	OK     bool       `json:"ok"`
	Since  time.Time  `json:"since"`  // of ok
	Detail string     `json:"detail"` // what was seen last, for people
	Last   *time.Time `json:"last"`   // when it was last looked at; null = not yet
} //	@name	Check

// DatabaseStatus says whether the database answers.
type DatabaseStatus struct {
	Reachable bool       `json:"reachable"`
	Detail    *string    `json:"detail"` // the cause when it does not
	Since     *time.Time `json:"since"`
	Notes     []string   `json:"notes"` // what an operator should look at, for example who holds an old snapshot
} //	@name	DatabaseStatus

// status says how this controller stands.
//
//	@Summary	Phases, ports and database of this controller
//	@ID			status
//	@Tags		status
//	@Produce	json
//	@Security	BearerAuth
//	@Security	CookieAuth
//	@Success	200	{object}	Status
//	@Failure	400	{object}	Problem
//	@Failure	401	{object}	Problem
//	@Failure	403	{object}	Problem
//	@Failure	421	{object}	Problem
//	@Failure	429	{object}	Problem
//	@Router		/api/v1/status [get]
func (s *server) status(w http.ResponseWriter, _ *http.Request) error {
	st := s.cfg.Status()
	st.Unmet = notNil(st.Unmet)
	st.ShardsOwned = notNil(st.ShardsOwned)
	st.Checks = notNil(st.Checks)
	st.Database.Notes = notNil(st.Database.Notes)
	st.Ports.Controller, st.Ports.Public = notNil(st.Ports.Controller), notNil(st.Ports.Public)
	st.Ports.Since = st.Ports.Since.UTC().Truncate(time.Microsecond)
	st.Since, st.StartedAt = st.Since.UTC().Truncate(time.Microsecond), st.StartedAt.UTC().Truncate(time.Microsecond)
	return s.writeJSON(w, http.StatusOK, st)
}

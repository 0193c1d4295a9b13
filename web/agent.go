package web

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"time"
	"uuid"

	"github.com/go-chi/chi/v5"

	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/tasks"
)

// agentPage is one agent.
type agentPage struct {
	agentRow
	Why      *because
	Open     []taskRow // not completed
	Ended    []taskRow // the newest completed ones
	More     bool      // there are more open ones
	Machine  []fact
	Disks    []disk
	Kinds    []kindView
	Path     []hop
	Key      string
	AllTasks string
}

// fact is one line of a list of facts.
type fact struct{ Name, Text string }

// disk is one file system with how full it is.
type disk struct {
	Mount string
	Text  string
	Used  int // percent
	State string
}

// kindView is what an agent's policy allows, in the product's words.
type kindView struct {
	Name     string
	Title    string
	Programs []fleet.Program
}

// hop is one step of the way to an agent.
type hop struct {
	State string
	Name  string
	Text  string
	Here  bool // it stops here
}

func (s *server) pathAgent(r *http.Request) (fleet.View, error) {
	ref := chi.URLParam(r, "id")
	id, err := uuid.Parse(ref)
	if err != nil {
		a, err := s.cfg.Fleet.Lookup(ref)
		if err != nil {
			return fleet.View{}, fault.Newf(fault.NotFound, "unknown_agent", "There is no agent %s.", clip(ref, 60)).
				WithHint("It may have been removed; the list of agents shows those that are enrolled.")
		}
		id = a.ID
	}
	return s.cfg.Fleet.Get(id)
}

func (s *server) agent(w http.ResponseWriter, r *http.Request) error {
	v, err := s.pathAgent(r)
	if err != nil {
		return err
	}
	var done *flash
	switch r.URL.Query().Get("done") {
	case "paused":
		done = &flash{"succeeded", v.Name + " is paused. Its tasks wait until it is resumed."}
	case "resumed":
		done = &flash{"succeeded", v.Name + " is resumed."}
	case "approved":
		done = &flash{"succeeded", v.Name + " is approved and is being connected."}
	}
	return s.showAgent(w, r, http.StatusOK, v, done)
}

func (s *server) showAgent(w http.ResponseWriter, r *http.Request, status int, v fleet.View, done *flash) error {
	rows, err := s.agentRows(r.Context(), []fleet.View{v})
	if err != nil {
		return err
	}
	p := s.newPage(r, v.Name, "agents", nil)
	d := &agentPage{agentRow: rows[0], Why: agentWhy(&v), Kinds: s.kindViews(v.Live.Kinds), Key: keyText(v.SPKI), AllTasks: "/tasks?agent=" + v.ID.String()}
	if err := s.agentTasks(r.Context(), d, p.Now); err != nil {
		return err
	}
	d.Machine, d.Disks = facts(&v)
	if d.Health != string(fleet.HealthConnected) {
		d.Path = hops(&v, p.Status.Name)
	}
	p.Data, p.Flash = d, done
	p.Path = "/agents/" + v.ID.String()
	return s.render(w, r, status, "agent", p.live(p.Path, tasks.TopicAgent(v.ID)))
}

func (s *server) agentTasks(ctx context.Context, d *agentPage, now time.Time) error {
	num := []tasks.AgentNum{d.View.Num}
	open, err := s.cfg.Tasks.List(ctx, tasks.Filter{Agents: num, States: []tasks.State{tasks.StateNew, tasks.StateWaiting}, Ascending: true, Limit: unfinished})
	if err != nil {
		return err
	}
	d.More = open.Next != 0
	ended, err := s.cfg.Tasks.List(ctx, tasks.Filter{Agents: num, States: []tasks.State{tasks.StateCompleted}, Limit: 10})
	if err != nil {
		return err
	}
	d.Open, d.Ended = taskRows(open.Items, now), taskRows(ended.Items, now)
	return nil
}

func (s *server) kindViews(offers []fleet.KindOffer) []kindView {
	views := make([]kindView, 0, len(offers))
	for _, o := range offers {
		k := kindView{Name: o.Name, Programs: o.Programs}
		if known, err := s.cfg.Kinds.Lookup(o.Name); err == nil {
			k.Title = known.Summary
		}
		views = append(views, k)
	}
	return views
}

// keyText shortens a fingerprint as far as people compare it.
func keyText(spki [32]byte) string {
	const hex = "0123456789abcdef"
	var b []byte
	for i, c := range spki {
		if i > 0 && i%4 == 0 {
			b = append(b, ' ')
		}
		b = append(b, hex[c>>4], hex[c&15])
	}
	return string(b)
}

// inventory is what the pages read of the result of core.inventory.
type inventory struct {
	Hostname string    `json:"hostname"`
	OS       string    `json:"os"`
	Kernel   string    `json:"kernel"`
	Arch     string    `json:"arch"`
	Virtual  string    `json:"virtualization"`
	BootedAt time.Time `json:"booted_at"`
	CPU      struct {
		Model   string `json:"model"`
		Logical int    `json:"logical"`
	} `json:"cpu"`
	Memory space `json:"memory"`
	Disks  []struct {
		Mount string `json:"mount"`
		space
	} `json:"disks"`
	Addresses []string `json:"addresses"`
}

type space struct {
	Total int64 `json:"total_bytes"`
	Used  int64 `json:"used_bytes"`
}

const (
	maxDisks     = 8
	maxAddresses = 8
	diskFull     = 90 // percent; from here on it is worth a colour
)

// facts reads what the last inventory said. What cannot be read is left out.
func facts(v *fleet.View) (list []fact, disks []disk) {
	var in inventory
	if len(v.Facts) > 0 && json.Unmarshal(v.Facts, &in) != nil {
		in = inventory{}
	}
	add := func(name, text string) {
		if text != "" {
			list = append(list, fact{name, clip(text, 200)})
		}
	}
	add("Host", orElse(in.Hostname, v.Hostname))
	add("System", orElse(in.OS, v.OS))
	add("Kernel", in.Kernel)
	if in.CPU.Logical > 0 {
		add("Processor", plural(in.CPU.Logical, "core")+", "+orElse(in.CPU.Model, in.Arch))
	}
	if in.Memory.Total > 0 {
		add("Memory", binarySize(in.Memory.Total)+", "+binarySize(in.Memory.Used)+" in use")
	}
	add("Virtual", in.Virtual)
	add("Clock", clockText(v.Live.ClockSkew))
	for _, a := range in.Addresses[:min(len(in.Addresses), maxAddresses)] {
		add("Address", a)
	}
	for _, d := range in.Disks[:min(len(in.Disks), maxDisks)] {
		if d.Total <= 0 || d.Used < 0 || d.Used > d.Total {
			continue
		}
		used := int(100 * float64(d.Used) / float64(d.Total))
		state := "connected"
		if used >= diskFull {
			state = "degraded"
		}
		disks = append(disks, disk{Mount: clip(d.Mount, 60), Text: binarySize(d.Total-d.Used) + " of " + binarySize(d.Total) + " free", Used: used, State: state})
	}
	return list, disks
}

// clockText says how far an agent's clock is off; what a call alone may take is
// none of it.
func clockText(skew *time.Duration) string {
	switch {
	case skew == nil:
		return ""
	case *skew >= time.Second:
		return age(*skew) + " before the controller’s"
	case *skew <= -time.Second:
		return age(-*skew) + " behind the controller’s"
	}
	return "as the controller’s"
}

// hops shows how far the way to an agent is good.
func hops(v *fleet.View, controller string) []hop {
	stop := map[string]int{
		fleet.CauseNoAddress: 1, fleet.CauseAddressRefused: 1, fleet.CauseNoSuchHost: 1, fleet.CauseUnreachable: 1,
		fleet.CauseTimeout: 1, fleet.CauseRefused: 2,
		fleet.CauseNotAnAgent: 3, fleet.CauseOtherAgent: 3, fleet.CauseKeyChanged: 3, fleet.CauseExpired: 3, fleet.CauseNotYetValid: 3,
		fleet.CauseUnknownCA: 3, fleet.CauseControllerDenied: 3,
		fleet.CauseEnded: 4, fleet.CauseSilent: 4, fleet.CauseStaleEpoch: 4, fleet.CauseProtocol: 4,
	}[v.Live.Cause]
	if stop == 0 || v.Live.Health != fleet.HealthUnreachable {
		return nil
	}
	names := []hop{
		{Name: "Controller", Text: orElse(controller, "this one")},
		{Name: "Network", Text: v.Live.Address},
		{Name: "Port", Text: "the machine answers"},
		{Name: "TLS", Text: "key and certificate"},
		{Name: "Agent", Text: "last said " + orElse(v.Version, "nothing")},
	}
	for i := range names {
		switch {
		case i < stop:
			names[i].State = "connected"
		case i == stop:
			names[i].State, names[i].Here = "unreachable", true
			names[i].Text = "it stops here"
		default:
			names[i].State, names[i].Text = "new", "not reached"
		}
	}
	return names
}

func (s *server) pauseAgent(w http.ResponseWriter, r *http.Request) error {
	return s.setPaused(w, r, true, "paused")
}

func (s *server) resumeAgent(w http.ResponseWriter, r *http.Request) error {
	return s.setPaused(w, r, false, "resumed")
}

func (s *server) setPaused(w http.ResponseWriter, r *http.Request, paused bool, done string) error {
	v, err := s.pathAgent(r)
	if err != nil {
		return err
	}
	if _, err := s.cfg.Fleet.Update(r.Context(), v.ID, fleet.Change{Paused: &paused}, principal(r).Actor()); err != nil {
		return s.agentTrouble(w, r, v, err)
	}
	s.census.stale()
	s.redirect(w, r, "/agents/"+v.ID.String()+"?done="+done)
	return nil
}

func (s *server) approveAgent(w http.ResponseWriter, r *http.Request) error {
	v, err := s.pathAgent(r)
	if err != nil {
		return err
	}
	if _, err := s.cfg.Fleet.Approve(r.Context(), v.ID, principal(r).Actor()); err != nil {
		return s.agentTrouble(w, r, v, err)
	}
	s.census.stale()
	s.redirect(w, r, "/agents/"+v.ID.String()+"?done=approved")
	return nil
}

func (s *server) pingAgent(w http.ResponseWriter, r *http.Request) error {
	v, err := s.pathAgent(r)
	if err != nil {
		return err
	}
	pong, err := s.cfg.Fleet.Ping(r.Context(), v.ID)
	if err != nil {
		return s.agentTrouble(w, r, v, err)
	}
	text := v.Name + " answered in " + took(pong.RTT) + ", outside its slot."
	if skew := time.Since(pong.Clock).Abs(); !pong.Clock.IsZero() && skew > 2*time.Second {
		text += " Its clock differs by " + age(skew) + "."
	}
	if v, err = s.cfg.Fleet.Get(v.ID); err != nil {
		return err
	}
	return s.showAgent(w, r, http.StatusOK, v, &flash{"succeeded", text})
}

// agentTrouble shows what went wrong above the agent's page.
func (s *server) agentTrouble(w http.ResponseWriter, r *http.Request, v fleet.View, err error) error {
	p := problemOf(err)
	if p.Status >= http.StatusInternalServerError && !slices.Contains([]fault.Kind{fault.Unavailable, fault.Deadline}, fault.KindOf(err)) {
		return err
	}
	return s.showAgent(w, r, p.Status, v, &flash{"failed", p.Text + " " + p.Hint})
}

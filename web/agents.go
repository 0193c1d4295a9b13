package web

import (
	"cmp"
	"context"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"headgate/internal/fleet"
	"headgate/tasks"
)

// agentRow is one agent in a list.
type agentRow struct {
	View    *fleet.View
	Health  string
	Line    string // why it is not well, "" when it is
	Now     *tasks.Task
	Waiting int // tasks that wait for it, -1 = unknown
	Labels  []string
}

// agentsPage is the list of agents.
type agentsPage struct {
	Rows   []agentRow
	Tabs   []tab
	Shown  int // that match
	Look   int // of these, need a look
	Box    string
	Clear  string // address without the filter, "" when there is none
	Older  string
	First  string
	NoneAt bool // no agent is enrolled
}

// tab is a link above a list.
type tab struct {
	Word    string
	Count   int // -1 = not counted
	Href    string
	Current bool
}

func (s *server) agents(w http.ResponseWriter, r *http.Request) error {
	q := expand(r.URL.Query(), agentQuery())
	limit, err := limitOf(q)
	if err != nil {
		return err
	}
	known := make([]string, 0, len(healths()))
	for _, h := range healths() {
		known = append(known, h.Word)
	}
	wanted, err := oneOf(q, "health", known)
	if err != nil {
		return err
	}
	p := s.newPage(r, "Agents", "agents", nil)
	all := s.census.now(p.Now)
	if q.Get("q") != "" || len(labels(q)) > 0 {
		all = newRoll(allAgents(s.cfg.Fleet, fleet.Filter{Query: q.Get("q"), Labels: labels(q)}))
	}
	matching := all.sorted
	if len(wanted) > 0 {
		matching = slices.DeleteFunc(slices.Clone(matching), func(v fleet.View) bool { return !slices.Contains(wanted, healthOf(&v)) })
	}
	d := &agentsPage{Shown: len(matching), Look: newRoll(slices.Clone(matching)).attention(), Box: boxText(q, agentQuery()), NoneAt: p.Agents == 0}
	d.Tabs = agentTabs(q, all)
	if d.Box != "" {
		d.Clear = "/agents"
	}
	matching = afterAgent(matching, r.URL.Query().Get("after"))
	if len(matching) > limit {
		matching = matching[:limit]
		last := &matching[limit-1]
		next := url.Values{}
		for n, v := range q {
			next[n] = v
		}
		next.Set("after", agentPlace(last))
		d.Older = "/agents?" + next.Encode()
	}
	if r.URL.Query().Get("after") != "" {
		d.First = with("/agents", q, "after", "")
	}
	if d.Rows, err = s.agentRows(r.Context(), matching); err != nil {
		return err
	}
	p.Data = d
	return s.render(w, r, http.StatusOK, "agents", p.live(r.URL.RequestURI(), allTopics))
}

func agentTabs(q url.Values, all *roll) []tab {
	tabs := []tab{{Word: "All", Count: all.total, Href: with("/agents", q, "health", ""), Current: q.Get("health") == ""}}
	for _, h := range slices.Backward(healths()) {
		if all.counts[h.Word] == 0 && q.Get("health") != h.Word {
			continue
		}
		tabs = append(tabs, tab{Word: h.Word, Count: all.counts[h.Word], Href: with("/agents", q, "health", h.Word), Current: q.Get("health") == h.Word})
	}
	return tabs
}

// agentPlace is a place in the order of attention, name and id. The health is
// in it, so that a page begins where the one before ended even when the agent
// has changed since.
func agentPlace(v *fleet.View) string {
	return healthOf(v) + "~" + v.ID.String() + "~" + v.Name
}

func afterAgent(sorted []fleet.View, place string) []fleet.View {
	health, rest, ok := strings.Cut(place, "~")
	id, name, ok2 := strings.Cut(rest, "~")
	if !ok || !ok2 {
		return sorted
	}
	i, _ := slices.BinarySearchFunc(sorted, 0, func(v fleet.View, _ int) int {
		order := cmp.Or(rank(healthOf(&v))-rank(health), strings.Compare(v.Name, name), strings.Compare(v.ID.String(), id))
		if order <= 0 {
			return -1
		}
		return 1
	})
	return sorted[i:]
}

// agentRows adds to agents what they are doing now.
func (s *server) agentRows(ctx context.Context, views []fleet.View) ([]agentRow, error) {
	rows := make([]agentRow, len(views))
	byNum := make(map[tasks.AgentNum]*agentRow, len(views))
	nums := make([]tasks.AgentNum, 0, len(views))
	for i := range views {
		v := &views[i]
		rows[i] = agentRow{View: v, Health: healthOf(v), Waiting: -1, Labels: sortedLabels(v.Labels)}
		if s.cfg.Counters != nil {
			if st, ok := s.cfg.Counters.AgentStats(v.Num); ok {
				rows[i].Waiting = st.Depth
			}
		}
		rows[i].Line = agentLine(v, rows[i].Waiting)
		byNum[v.Num] = &rows[i]
		nums = append(nums, v.Num)
	}
	if len(nums) == 0 {
		return rows, nil
	}
	running, err := s.cfg.Tasks.List(ctx, tasks.Filter{States: []tasks.State{tasks.StateWaiting}, Agents: nums, Limit: tasks.MaxPage})
	if err != nil {
		return nil, err
	}
	for i := range running.Items {
		if row := byNum[running.Items[i].Agent.Num]; row != nil {
			row.Now = &running.Items[i]
		}
	}
	return rows, nil
}

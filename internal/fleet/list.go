package fleet

import (
	"bytes"
	"encoding/base64"
	"slices"
	"sort"
	"strings"
	"time"
	"uuid"

	"headgate/internal/fault"
)

const (
	defaultPage = 100
	// MaxPage is the longest page of agents.
	MaxPage = 500
)

// List gives a page of agents in the order of name and id.
func (f *Fleet) List(filter Filter) ([]View, error) {
	if filter.Limit <= 0 {
		filter.Limit = defaultPage
	}
	order := f.reg.all()
	start := 0
	if filter.After != "" {
		after, err := readCursor(filter.After)
		if err != nil {
			return nil, err
		}
		start = sort.Search(len(order), func(i int) bool { return order[i].compare(after) > 0 })
	}
	query := strings.ToLower(strings.TrimSpace(filter.Query))
	now := time.Now()
	page := make([]View, 0, min(filter.Limit, MaxPage))
	for _, p := range order[start:] {
		if len(page) == cap(page) {
			break
		}
		if p.m.matches(&filter, query) {
			page = append(page, p.m.view(now))
		}
	}
	return page, nil
}

// Cursor gives the Filter.After that continues behind v.
func Cursor(v View) string {
	return base64.RawURLEncoding.EncodeToString(append([]byte(v.Name+"\x00"), v.ID[:]...))
}

func readCursor(text string) (place, error) {
	raw, err := base64.RawURLEncoding.DecodeString(text)
	at := bytes.LastIndexByte(raw[:max(0, len(raw)-len(uuid.UUID{}))], 0)
	if err != nil || at < 0 || len(raw) != at+1+len(uuid.UUID{}) {
		return place{}, fault.New(fault.Malformed, "invalid_cursor", "The cursor is not one that this list gave.").
			WithHint("Take next_cursor of the page before, unchanged.")
	}
	return place{name: string(raw[:at]), id: uuid.UUID(raw[at+1:])}, nil
}

func (m *member) matches(filter *Filter, query string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(filter.Health) > 0 && !slices.Contains(filter.Health, m.live.Health) {
		return false
	}
	for key, want := range filter.Labels {
		if have, ok := m.row.Labels[key]; !ok || have != want {
			return false
		}
	}
	return query == "" || strings.HasPrefix(strings.ToLower(m.row.Name), query) ||
		strings.HasPrefix(m.id.String(), query) ||
		slices.ContainsFunc(m.row.Addresses, func(a string) bool { return strings.HasPrefix(a, query) })
}

// Get gives one agent.
func (f *Fleet) Get(id uuid.UUID) (View, error) {
	m, err := f.find(id)
	if err != nil {
		return View{}, err
	}
	return m.view(time.Now()), nil
}

// Kinds gives what the agent's policy allowed when it was last connected.
func (f *Fleet) Kinds(id uuid.UUID) ([]KindOffer, error) {
	v, err := f.Get(id)
	return v.Live.Kinds, err
}

// Counts gives the number of agents in each health.
func (f *Fleet) Counts() map[Health]int {
	counts := map[Health]int{}
	for _, p := range f.reg.all() {
		p.m.mu.Lock()
		counts[p.m.live.Health]++
		p.m.mu.Unlock()
	}
	return counts
}

func (f *Fleet) find(id uuid.UUID) (*member, error) {
	if m := f.reg.id(id); m != nil {
		return m, nil
	}
	return nil, fault.Newf(fault.NotFound, CodeUnknownAgent, "There is no agent %s.", id).
		WithHint("It may have been removed; the list of agents shows those that are enrolled.")
}

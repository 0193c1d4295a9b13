package web

import (
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"headgate/internal/fault"
	"headgate/tasks"
)

// The names of filters are those of REST, so that a page's address and a call
// can be made from each other.

const labelPrefix = "label."

// pageSizes of lists: what a browser shows well.
const (
	pageSize    = 50
	maxPageSize = 200
)

func taskQuery() []string {
	return []string{"state", "outcome", "agent", "kind", "q", "created_after", "created_before", labelPrefix + "*", "limit", "before", "at", "done"}
}

func agentQuery() []string { return []string{"health", "q", labelPrefix + "*", "limit", "after"} }

// checkQuery refuses parameters that a page does not know: a typing error in a
// filter must not show everything.
func checkQuery(r *http.Request, known []string) error {
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return fault.New(fault.Malformed, "malformed_query", "The address is not well formed.").WithHint("Clear the filter and set it again.")
	}
	for name, all := range values {
		isLabel := strings.HasPrefix(name, labelPrefix) && len(name) > len(labelPrefix) && slices.Contains(known, labelPrefix+"*")
		if !isLabel && !slices.Contains(known, name) {
			return fault.Newf(fault.Malformed, "unknown_parameter", "The filter %s is not known here.", clip(name, 40)).
				WithHint("The filters are: " + strings.Join(shown(known), ", ") + ".")
		}
		if !utf8.ValidString(all[0]) || strings.ContainsRune(all[0], 0) {
			return badFilter(name, "holds a NUL character or bytes that are not UTF-8")
		}
	}
	return nil
}

// shown leaves out the parameters that only pages use among themselves.
func shown(known []string) []string {
	return slices.DeleteFunc(slices.Clone(known), func(n string) bool {
		return n == "before" || n == "after" || n == "at" || n == "done" || n == "from"
	})
}

func badFilter(name, what string) error {
	return fault.Newf(fault.Malformed, "bad_parameter", "The filter %s %s.", clip(name, 40), what).WithField(name, what)
}

// expand reads a filter box: words of the form name=value become filters of
// their own, the rest is q. So "state=new dns-" works when typed.
func expand(q url.Values, known []string) url.Values {
	out := url.Values{}
	for name, v := range q {
		if name != "q" && v[0] != "" {
			out[name] = v[:1]
		}
	}
	var rest []string
	for word := range strings.FieldsSeq(q.Get("q")) {
		name, value, ok := strings.Cut(word, "=")
		if ok && value != "" && (slices.Contains(shown(known), name) || strings.HasPrefix(name, labelPrefix)) {
			out.Set(name, value)
		} else {
			rest = append(rest, word)
		}
	}
	if len(rest) > 0 {
		out.Set("q", strings.Join(rest, " "))
	}
	return out
}

// boxText is the opposite of expand: what the filter box shows.
func boxText(q url.Values, known []string) string {
	var words []string
	for name, v := range q {
		if name == "q" || name == "limit" || !slices.Contains(shown(known), name) && !strings.HasPrefix(name, labelPrefix) {
			continue
		}
		words = append(words, name+"="+v[0])
	}
	slices.Sort(words)
	return strings.TrimSpace(strings.Join(words, " ") + " " + q.Get("q"))
}

// with gives an address with a filter changed; "" removes it. Places in the
// list do not survive a change of the filter.
func with(path string, q url.Values, name, value string) string {
	out := url.Values{}
	for n, v := range q {
		if n != "before" && n != "after" && n != "at" && n != "done" {
			out[n] = v
		}
	}
	out.Del(name)
	if value != "" {
		out.Set(name, value)
	}
	if len(out) == 0 {
		return path
	}
	return path + "?" + out.Encode()
}

// list splits a comma separated filter; nil when it is missing.
func list(q url.Values, name string) []string {
	if q.Get(name) == "" {
		return nil
	}
	return strings.Split(q.Get(name), ",")
}

// oneOf reads a filter whose values are a closed set.
func oneOf[T ~string](q url.Values, name string, known []T) ([]T, error) {
	var out []T
	for _, v := range list(q, name) {
		if !slices.Contains(known, T(v)) {
			return nil, badFilter(name, "has the unknown value "+strconv.Quote(clip(v, 40)))
		}
		out = append(out, T(v))
	}
	return out, nil
}

func labels(q url.Values) map[string]string {
	var out map[string]string
	for name, v := range q {
		if key, ok := strings.CutPrefix(name, labelPrefix); ok && key != "" {
			if out == nil {
				out = map[string]string{}
			}
			out[key] = v[0]
		}
	}
	return out
}

func limitOf(q url.Values) (int, error) {
	if q.Get("limit") == "" {
		return pageSize, nil
	}
	n, err := strconv.Atoi(q.Get("limit"))
	if err != nil || n < 1 {
		return 0, badFilter("limit", "must be a whole number from 1 to "+strconv.Itoa(maxPageSize))
	}
	return min(n, maxPageSize), nil
}

// instant reads a time: RFC 3339, or relative to now such as -24h.
func instant(q url.Values, name string, now time.Time) (time.Time, error) {
	text := q.Get(name)
	if text == "" {
		return time.Time{}, nil
	}
	if t, err := time.Parse(time.RFC3339, text); err == nil {
		return t, nil
	}
	if d, err := time.ParseDuration(text); err == nil && (text[0] == '-' || d == 0) {
		return now.Add(d), nil
	}
	return time.Time{}, badFilter(name, "must be a time such as 2026-01-31T12:00:00Z, or relative to now such as -24h")
}

func states() []tasks.State {
	return []tasks.State{tasks.StateNew, tasks.StateWaiting, tasks.StateCompleted}
}

func outcomes() []tasks.Outcome {
	return []tasks.Outcome{tasks.Succeeded, tasks.Failed, tasks.TimedOut, tasks.Rejected, tasks.Unknown, tasks.Expired, tasks.Cancelled}
}

// taskFilter reads the filter of the list of tasks. Its place in the list is
// read by the page.
func (s *server) taskFilter(q url.Values, now time.Time) (f tasks.Filter, err error) {
	f = tasks.Filter{Kinds: list(q, "kind"), Query: q.Get("q"), Labels: labels(q)}
	if f.Limit, err = limitOf(q); err != nil {
		return f, err
	}
	if f.States, err = oneOf(q, "state", states()); err != nil {
		return f, err
	}
	if f.Outcomes, err = oneOf(q, "outcome", outcomes()); err != nil {
		return f, err
	}
	if f.CreatedAfter, err = instant(q, "created_after", now); err != nil {
		return f, err
	}
	if f.CreatedBefore, err = instant(q, "created_before", now); err != nil {
		return f, err
	}
	for _, ref := range list(q, "agent") {
		a, err := s.cfg.Fleet.Lookup(ref)
		if err != nil {
			return f, err
		}
		f.Agents = append(f.Agents, a.Num)
	}
	return f, nil
}

// placeOf reads an id that says where a list begins; 0 when it is missing.
func placeOf(q url.Values, name string) (tasks.ID, error) {
	if q.Get(name) == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(q.Get(name), 10, 64)
	if err != nil || n < 1 {
		return 0, badFilter(name, "is not the id of a task")
	}
	return tasks.ID(n), nil
}

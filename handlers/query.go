package handlers

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"headgate/internal/fault"
	"headgate/tasks"
)

// Limits of waits.
const (
	maxWait      = 120 * time.Second // proxies end silent requests; 30-60 s is common, this is for direct callers
	waitReserved = 0
)

// labelPrefix begins the query parameters that select by an agent's label.
const labelPrefix = "label."

// checkQuery refuses query parameters that the route does not know: a typing
// error in a filter must not select everything.
func checkQuery(r *http.Request, known []string) error {
	if r.URL.RawQuery == "" {
		return nil
	}
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return fault.New(fault.Malformed, "malformed_query", "The query of the address is not well formed.").
			WithHint("Encode special characters with percent signs.")
	}
	for name, all := range values {
		isLabel := strings.HasPrefix(name, labelPrefix) && len(name) > len(labelPrefix) && slices.Contains(known, labelPrefix+"*")
		if !isLabel && !slices.Contains(known, name) {
			return fault.Newf(fault.Malformed, "unknown_parameter", "The query parameter %q is not known here.", clip(name)).
				WithHint(suggest(name, known, "parameter")).WithField(name, "unknown parameter")
		}
		if len(all) > 1 {
			return badParameter(name, "is given more than once", "Give several values with commas between them.")
		}
		if strings.ContainsRune(all[0], 0) || !validText(all[0]) {
			return badParameter(name, "holds a NUL character or bytes that are not UTF-8", "Remove them.")
		}
	}
	return nil
}

func badParameter(name, what, hint string) error {
	return fault.Newf(fault.Malformed, "bad_parameter", "The query parameter %s %s.", clip(name), what).
		WithHint(hint).WithField(name, what)
}

// list splits a comma separated parameter; nil when it is missing.
func list(q url.Values, name string) []string {
	if q.Get(name) == "" {
		return nil
	}
	return strings.Split(q.Get(name), ",")
}

// oneOf reads a comma separated parameter whose values are a closed set.
func oneOf[T ~string](q url.Values, name string, known ...T) ([]T, error) {
	var out []T
	for _, v := range list(q, name) {
		if !slices.Contains(known, T(v)) {
			names := make([]string, len(known))
			for i, k := range known {
				names[i] = string(k)
			}
			return nil, badParameter(name, "has the unknown value "+strconv.Quote(clip(v)), suggest(v, names, "value"))
		}
		out = append(out, T(v))
	}
	return out, nil
}

// labels reads the label.* parameters.
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

// limitOf reads the page size; a larger one than allowed is cut, as is usual.
func limitOf(q url.Values) (int, error) {
	if !q.Has("limit") {
		return tasks.DefaultPage, nil
	}
	n, err := strconv.Atoi(q.Get("limit"))
	if err != nil || n < 1 {
		return 0, badParameter("limit", "must be a whole number from 1 to "+strconv.Itoa(tasks.MaxPage), "Leave it out for "+strconv.Itoa(tasks.DefaultPage)+".")
	}
	return min(n, tasks.MaxPage), nil
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
	return time.Time{}, badParameter(name, "must be a time such as 2026-01-31T12:00:00Z, or relative to now such as -24h", "In an address, + must be written as %2B.")
}

// waitOf reads how long a caller is willing to wait: ?wait=30s, or the header
// Prefer: wait=30 of RFC 7240, which is a wish and is cut silently.
func waitOf(r *http.Request) (d time.Duration, preferred bool, err error) {
	text := ""
	if r.URL.RawQuery != "" {
		text = r.URL.Query().Get("wait")
	}
	if text != "" {
		d, err := time.ParseDuration(text)
		if n, intErr := strconv.Atoi(text); intErr == nil {
			d, err = time.Duration(n)*time.Second, nil
		}
		if err != nil || d < 0 || d > maxWait {
			return 0, false, badParameter("wait", "must be a duration from 0s to 120s, such as 30s", "Ask again to wait longer.")
		}
		return d, false, nil
	}
	for _, line := range r.Header["Prefer"] {
		for part := range strings.SplitSeq(line, ",") {
			name, value, _ := strings.Cut(strings.TrimSpace(part), "=")
			if n, err := strconv.Atoi(strings.Trim(value, `" `)); err == nil && n >= 0 && strings.EqualFold(strings.TrimSpace(name), "wait") {
				return min(time.Duration(n)*time.Second, maxWait), true, nil
			}
		}
	}
	return 0, false, nil
}

// A cursor is opaque: the place to go on from, bound to the filter of its
// list, so that it is not used with another one by mistake.
func makeCursor(q url.Values, place string) string {
	return base64.RawURLEncoding.EncodeToString(append(filterSum(q), place...))
}

func readCursor(q url.Values) (string, error) {
	text := q.Get("cursor")
	if text == "" {
		return "", nil
	}
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || len(raw) < 5 {
		return "", badParameter("cursor", "is not one that this list gave", "Begin again without it.")
	}
	if string(raw[:4]) != string(filterSum(q)) {
		return "", badParameter("cursor", "belongs to a list with other filters", "Begin again without it, or use the filters it was given with.")
	}
	return string(raw[4:]), nil
}

// filterSum is short because it guards against mistakes, not against malice:
// a cursor gives no access that a filter would not give.
func filterSum(q url.Values) []byte {
	rest := url.Values{}
	for name, v := range q {
		if name != "cursor" && name != "limit" {
			rest[name] = v
		}
	}
	sum := sha256.Sum256([]byte(rest.Encode()))
	return binary.BigEndian.AppendUint32(nil, binary.BigEndian.Uint32(sum[:4]))
}

// setNext tells where the next page is, in the body's words and as a Link.
func setNext(w http.ResponseWriter, r *http.Request, q url.Values, cursor string) {
	next := url.Values{}
	for name, v := range q {
		next[name] = v
	}
	next.Set("cursor", cursor)
	w.Header().Set("Link", "<"+at(r, r.URL.Path)+"?"+next.Encode()+`>; rel="next"`)
}

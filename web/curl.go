package web

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"headgate/tasks"
)

// The commands that pages show do exactly what the page does, with a token in
// place of the session.

// origin gives the address at which the reader reached us, with the base path.
func (s *server) origin(r *http.Request) string {
	scheme := "http://"
	if s.cfg.Auth.Secure(r) {
		scheme = "https://"
	}
	return scheme + r.Host + s.cfg.BasePath
}

const curlAuth = `curl -sS -H "Authorization: Bearer $TOKEN"`

func listCurl(origin string, q url.Values) string {
	out := url.Values{}
	for n, v := range q {
		if n != "before" && n != "at" && n != "done" {
			out[n] = v
		}
	}
	address := origin + "/api/v1/tasks"
	if len(out) > 0 {
		address += "?" + out.Encode()
	}
	return curlAuth + " " + quoteShell(address)
}

// submission is a task as REST takes it.
type submission struct {
	Agent    string          `json:"agent"`
	Kind     string          `json:"kind"`
	Args     json.RawMessage `json:"args,omitempty"`
	Timeout  string          `json:"timeout,omitempty"`
	Priority *int            `json:"priority,omitempty"`
}

func submitCurl(origin string, sub submission) string {
	body, err := json.Marshal(sub)
	if err != nil {
		return ""
	}
	// The encoder escapes < > & for pages; in a shell that is only noise.
	text := strings.NewReplacer(`\u003c`, "<", `\u003e`, ">", `\u0026`, "&").Replace(string(body))
	return curlAuth + " \\\n--json " + quoteShell(text) + " \\\n" + quoteShell(origin+"/api/v1/tasks?wait=30s")
}

// taskCurl submits a task once more as it was.
func taskCurl(origin string, t *tasks.Task) string {
	sub := submission{Agent: t.Agent.Name, Kind: t.Kind, Args: t.Args, Timeout: durationText(t.Timeout)}
	if t.Agent.Name == "" {
		sub.Agent = t.Agent.ID.String()
	}
	if t.Priority != tasks.DefaultPriority {
		sub.Priority = &t.Priority
	}
	return submitCurl(origin, sub)
}

// quoteShell makes one word for a POSIX shell of any text.
func quoteShell(text string) string {
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

// durationText writes a duration as REST takes it: 30s, 5m, 1h30m.
func durationText(d time.Duration) string {
	if d <= 0 {
		return ""
	}
	if d%time.Second != 0 {
		return d.String()
	}
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// repeatAddress gives the run form filled with a task.
func repeatAddress(t *tasks.Task) string {
	q := url.Values{"agent": {t.Agent.ID.String()}, "kind": {t.Kind}}
	if args := string(t.Args); args != "" && args != "{}" && len(args) <= maxRepeatArgs {
		q.Set("args", args)
	}
	if t.Timeout > 0 {
		q.Set("timeout", durationText(t.Timeout))
	}
	if t.Priority != tasks.DefaultPriority {
		q.Set("priority", strconv.Itoa(t.Priority))
	}
	return "/run?" + q.Encode()
}

// maxRepeatArgs is how many bytes of arguments travel in an address.
const maxRepeatArgs = 4 << 10

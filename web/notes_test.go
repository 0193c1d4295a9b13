package web_test

import (
	"strings"
	"testing"

	"headgate/internal/auth"
)

func TestTheOverviewShowsWhatAnOperatorShouldReadOfTheDatabase(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.add("dns-ams-01")
	r.ready()
	r.status.Notes = []string{"the database is older than the fleet: <1> agent(s)"}
	if body := r.get(auth.Viewer, "/").Body.String(); !strings.Contains(body, "Note: the database is older than the fleet: &lt;1&gt; agent(s)") {
		t.Errorf("no note on the overview:\n%s", body)
	}
}

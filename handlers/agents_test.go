package handlers_test

import (
	"net/http"
	"strings"
	"testing"

	"headgate/handlers"
	"headgate/internal/auth"
)

func TestAgentsAreListedReadChangedAndRemoved(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	var all []handlers.AgentBody
	for next := "/api/v1/agents?limit=2"; next != ""; {
		res := rig.do(t, "GET", next, "", auth.Viewer, nil)
		link := res.Header.Get("Link")
		all = append(all, decode[handlers.AgentPage](t, res, http.StatusOK).Items...)
		next, _, _ = strings.Cut(strings.TrimPrefix(link, "<"), ">")
	}
	var got []string
	for _, a := range all {
		got = append(got, a.Name)
	}
	if strings.Join(got, " ") != "alpha beta gamma twin twin" {
		t.Fatalf("agents %v", got)
	}
	byID := decode[handlers.AgentBody](t, rig.do(t, "GET", "/api/v1/agents/"+all[0].ID, "", auth.Viewer, nil), http.StatusOK)
	res := rig.do(t, "GET", "/api/v1/agents/alpha", "", auth.Viewer, nil)
	etag := res.Header.Get("ETag")
	if byName := decode[handlers.AgentBody](t, res, http.StatusOK); byName.ID != byID.ID || etag == "" {
		t.Errorf("by name %s, by id %s, ETag %q", byName.ID, byID.ID, etag)
	}
	change := `{"name":"al pha","labels":{"env":"prod"},"paused":true}`
	changed := decode[handlers.AgentBody](t, rig.do(t, "PATCH", "/api/v1/agents/alpha", change, auth.Admin, map[string]string{"If-Match": etag}), http.StatusOK)
	if changed.Name != "al pha" || changed.PausedAt == nil || changed.PausedBy == nil || *changed.PausedBy != "token:admin" || changed.Labels["env"] != "prod" {
		t.Errorf("%+v", changed)
	}
	if p := readProblem(t, rig.do(t, "PATCH", "/api/v1/agents/"+byID.ID, change, auth.Admin, map[string]string{"If-Match": etag})); p.Status != 412 {
		t.Errorf("the old version once more: %+v", p)
	}
	if p := readProblem(t, rig.do(t, "DELETE", "/api/v1/agents/"+byID.ID, "", auth.Admin, map[string]string{"If-Match": etag})); p.Status != 412 {
		t.Errorf("removal of an old version: %+v", p)
	}
	if res := rig.do(t, "GET", "/api/v1/agents/al%20pha", "", auth.Viewer, nil); res.StatusCode != http.StatusOK {
		t.Errorf("name with a space: %d", res.StatusCode)
	}
	if res := rig.do(t, "DELETE", "/api/v1/agents/"+byID.ID, "", auth.Admin, nil); res.StatusCode != http.StatusNoContent {
		t.Errorf("removal: %d %s", res.StatusCode, readBody(t, res))
	}
	if res := rig.do(t, "GET", "/api/v1/agents/"+byID.ID, "", auth.Viewer, nil); res.StatusCode != http.StatusNotFound {
		t.Errorf("after the removal: %d", res.StatusCode)
	}
}

func TestKindsAndTokensForAgents(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	kinds := decode[handlers.KindPage](t, rig.do(t, "GET", "/api/v1/kinds", "", auth.Viewer, nil), http.StatusOK)
	found := map[string]bool{}
	for _, k := range kinds.Items {
		found[k.Name] = len(k.Schema) > 2
	}
	for _, name := range []string{"core.ping", "core.echo", "core.sleep", "core.inventory", "cmd.run"} {
		if !found[name] {
			t.Errorf("kind %s is missing or has no schema", name)
		}
	}
	if own := decode[handlers.AgentKindPage](t, rig.do(t, "GET", "/api/v1/agents/beta/kinds", "", auth.Viewer, nil), http.StatusOK); own.Items == nil {
		t.Error("items is null")
	}
	made := decode[handlers.MadeEnrolmentTokenBody](t, rig.do(t, "POST", "/api/v1/enrolment-tokens", `{"expires_in":"2h","max_uses":3}`, auth.Admin, nil), http.StatusCreated)
	if made.Token == "" || made.MaxUses != 3 {
		t.Errorf("%+v", made)
	}
	for _, body := range []string{`{"expires_in":"-1h"}`, `{"max_uses":-1}`, `{"expires_in":"9000h"}`} {
		if p := readProblem(t, rig.do(t, "POST", "/api/v1/enrolment-tokens", body, auth.Admin, nil)); p.Status != 422 {
			t.Errorf("%s: %+v", body, p)
		}
	}
}

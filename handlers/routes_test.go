package handlers_test

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"headgate/handlers"
	"headgate/internal/auth"
	"headgate/openapi"
)

func table(t *testing.T) ([]handlers.RouteInfo, map[string]bool) {
	t.Helper()
	s, err := auth.New(auth.Config{Store: newRig(t).store})
	if err != nil {
		t.Fatal(err)
	}
	list, served, err := handlers.Table(handlers.Config{Auth: s})
	if err != nil {
		t.Fatal(err)
	}
	return list, served
}

func permissions() []auth.Permission {
	return []auth.Permission{
		auth.Public, auth.ReadTasks, auth.SubmitTasks, auth.CancelTasks, auth.ReadAgents, auth.ManageAgents, auth.PairAgents, auth.PingAgents,
		auth.ReadStatus, auth.ReadMetrics, auth.ManageTokens, auth.OwnSession, auth.CallPeer,
	}
}

// TestTheRouterServesTheTableAndNothingElse walks the router: every route has
// a permission and stands in the table, and the reverse.
func TestTheRouterServesTheTableAndNothingElse(t *testing.T) {
	t.Parallel()
	list, served := table(t)
	for _, rt := range list {
		if !slices.Contains(permissions(), rt.Permission) {
			t.Errorf("%s %s has the permission %q", rt.Method, rt.Pattern, rt.Permission)
		}
		if rt.Permission == auth.Public && rt.Method != http.MethodGet && rt.Pattern != "/api/v1/session" {
			t.Errorf("%s %s changes something and is public", rt.Method, rt.Pattern)
		}
		if !served[rt.Method+" "+rt.Pattern] {
			t.Errorf("%s %s is not served", rt.Method, rt.Pattern)
		}
		delete(served, rt.Method+" "+rt.Pattern)
		if rt.Method == http.MethodGet && !rt.Stream {
			delete(served, "HEAD "+rt.Pattern)
		}
	}
	for route := range served {
		t.Errorf("%s is served and not in the table", route)
	}
}

// TestTheContractListsEveryRouteAndTheReverse compares table and document,
// with the query parameters of each and the need of a credential.
func TestTheContractListsEveryRouteAndTheReverse(t *testing.T) {
	t.Parallel()
	var doc struct {
		Paths map[string]map[string]struct {
			Parameters  []struct{ Name, In string }
			RequestBody any
			Security    []any
		}
	}
	if err := json.Unmarshal(openapi.JSON(), &doc); err != nil {
		t.Fatal(err)
	}
	list, _ := table(t)
	for _, rt := range list {
		op, ok := doc.Paths[rt.Pattern][strings.ToLower(rt.Method)]
		if ok == rt.Page {
			t.Errorf("%s %s: in the contract %v, a page %v", rt.Method, rt.Pattern, ok, rt.Page)
		}
		delete(doc.Paths[rt.Pattern], strings.ToLower(rt.Method))
		if !ok {
			continue
		}
		var query []string
		for _, p := range op.Parameters {
			if p.In == "query" {
				query = append(query, strings.Replace(p.Name, "label", "label.*", 1))
			}
		}
		slices.Sort(query)
		want := slices.Sorted(slices.Values(rt.Query))
		if !slices.Equal(query, want) {
			t.Errorf("%s %s: query parameters %v in the contract, %v served", rt.Method, rt.Pattern, query, want)
		}
		if (op.RequestBody != nil) != (rt.Body > 0) {
			t.Errorf("%s %s: body in the contract %v, read %v", rt.Method, rt.Pattern, op.RequestBody != nil, rt.Body > 0)
		}
		if (len(op.Security) > 0) != (rt.Permission != auth.Public) {
			t.Errorf("%s %s: security %v, permission %s", rt.Method, rt.Pattern, op.Security, rt.Permission)
		}
	}
	for path, methods := range doc.Paths {
		for method := range methods {
			t.Errorf("%s %s is in the contract and not served", method, path)
		}
	}
}

// TestRolesReachExactlyTheirRoutes asks every route as every role, by token
// and by cookie, on both ports.
func TestRolesReachExactlyTheirRoutes(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	list, _ := table(t)
	for _, public := range []bool{false, true} {
		rig.public.Store(public)
		for _, rt := range list {
			if rt.Stream {
				continue // has its own tests
			}
			path := strings.NewReplacer("{id}", "7", "{code}", "x", "{file}", "init.js").Replace(rt.Pattern)
			for _, role := range append(auth.TokenRoles(), "") {
				for _, cookie := range []bool{false, true} {
					askAs(t, rig, rt, path, role, cookie, public)
				}
			}
		}
	}
}

func askAs(t *testing.T, rig *rig, rt handlers.RouteInfo, path string, role auth.Role, cookie, public bool) {
	t.Helper()
	token, header := role, map[string]string{}
	if cookie {
		token = ""
		header["Cookie"] = auth.CookieName + "=" + rig.cookies[role]
	}
	if rt.Method == http.MethodDelete && rt.Pattern == "/api/v1/session" && cookie {
		return // would end the session that the others use
	}
	res := rig.do(t, rt.Method, path, "", token, header)
	want := "allowed"
	switch {
	case rt.ControllerOnly && public:
		want = "404"
	case rt.Permission == auth.Public:
	case role == "":
		want = "401"
	case !slices.Contains(auth.Permissions(role), rt.Permission):
		want = "403"
	}
	got := "allowed"
	if res.StatusCode == 401 || res.StatusCode == 403 || rt.ControllerOnly && res.StatusCode == 404 {
		got = res.Status[:3]
	}
	if got != want {
		t.Errorf("%s %s as %q (cookie %v, public port %v): %d, want %s", rt.Method, path, role, cookie, public, res.StatusCode, want)
	}
}

package store

import (
	"encoding/json"
	"testing"
	"time"
	"uuid"

	"github.com/google/go-cmp/cmp"

	"headgate/internal/auth"
	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/tasks"
)

func wantCode(t *testing.T, err error, kind fault.Kind, code string) {
	t.Helper()
	if fault.KindOf(err) != kind || fault.CodeOf(err) != code {
		t.Errorf("error is %v, want kind %d and code %s", err, kind, code)
	}
}

func newAgent(name string) fleet.Agent {
	a := fleet.Agent{
		ID: uuid.New(), Name: name, Addresses: []string{"10.0.0.1:7442"}, Labels: map[string]string{"site": "a"},
		CertSerial: "01", CertExpires: time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC), Hostname: "h\x00", OS: "linux",
		PairedAt: time.Now().UTC().Truncate(time.Microsecond), PairedBy: "user:admin",
	}
	copy(a.SPKI[:], a.ID[:])
	return a
}

func TestAgentsAreStoredChangedAndRemoved(t *testing.T) {
	t.Parallel()
	d := open(t)
	ctx := t.Context()
	in := newAgent("one")
	got, err := d.InsertAgent(ctx, in)
	if err != nil {
		t.Fatal(err)
	}
	want := in
	want.Num, want.Status, want.Revision, want.Hostname = got.Num, fleet.Enrolling, 1, "h\uFFFD"
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("stored agent (-want +got):\n%s", diff)
	}
	other := newAgent("two")
	other.ID = in.ID
	_, err = d.InsertAgent(ctx, other)
	wantCode(t, err, fault.Conflict, "agent_exists")
	other.ID, other.SPKI = uuid.New(), in.SPKI
	_, err = d.InsertAgent(ctx, other)
	wantCode(t, err, fault.Conflict, "agent_exists")

	if got, err = d.ConfirmAgent(ctx, in.ID); err != nil || got.Status != fleet.Active {
		t.Fatalf("confirmed: %+v, %v", got, err)
	}
	name, paused := "renamed", true
	got, err = d.ChangeAgent(ctx, in.ID, fleet.Change{Name: &name, Paused: &paused, Revision: got.Revision}, "user:op")
	if err != nil || got.Name != name || got.PausedAt.IsZero() || got.PausedBy != "user:op" || got.Labels["site"] != "a" {
		t.Fatalf("changed: %+v, %v", got, err)
	}
	_, err = d.ChangeAgent(ctx, in.ID, fleet.Change{Name: &name, Revision: 1}, "user:op")
	wantCode(t, err, fault.Precondition, "revision_changed")
	_, err = d.ChangeAgent(ctx, uuid.New(), fleet.Change{}, "user:op")
	wantCode(t, err, fault.NotFound, "unknown_agent")

	ledger, me := uuid.New(), tasks.Owner{ID: uuid.New()}
	held, err := d.Acquire(ctx, me, nil, []tasks.Shard{tasks.ShardOf(in.ID)})
	if err != nil || len(held) != 1 {
		t.Fatal(held, err)
	}
	if err := d.SetSeen(ctx, got.Num, held[0], ledger, "1.2", "host", "linux"); err != nil {
		t.Fatal(err)
	}
	// Who owned the agent before has nothing to say any more.
	if _, err := d.Acquire(ctx, me, nil, []tasks.Shard{tasks.ShardOf(in.ID)}); err != nil {
		t.Fatal(err)
	}
	wantCode(t, d.SetSeen(ctx, got.Num, held[0], uuid.New(), "0", "old", "old"), fault.Unavailable, "lease_lost")
	if err := d.SetFacts(ctx, got.Num, json.RawMessage(`{"cpus":2}`), time.Now()); err != nil {
		t.Fatal(err)
	}
	list, err := d.Agents(ctx)
	if err != nil || len(list) != 1 || list[0].LedgerID != ledger || string(list[0].Facts) != `{"cpus":2}` || list[0].Hostname != "host" {
		t.Fatalf("agents: %+v, %v", list, err)
	}
	if _, err := d.SetStatus(ctx, in.ID, fleet.Removed, "gone", "user:op"); err != nil {
		t.Fatal(err)
	}
	if list, err = d.Agents(ctx); err != nil || len(list) != 0 {
		t.Errorf("agents after removal: %v, %v", list, err)
	}
	// It may come back, under a new number.
	again, err := d.InsertAgent(ctx, in)
	if err != nil || again.Num == got.Num {
		t.Errorf("enrolled again: %+v, %v", again, err)
	}
	if err := d.DropEnrolling(ctx, time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	if list, err = d.Agents(ctx); err != nil || len(list) != 0 {
		t.Errorf("agents after the drop of those enrolling: %v, %v", list, err)
	}
}

func TestEnrolmentTokensAreCounted(t *testing.T) {
	t.Parallel()
	d := open(t)
	ctx := t.Context()
	good := fleet.EnrolmentToken{ID: [8]byte{1}, SecretHash: [32]byte{2}, CreatedBy: "user:a", ExpiresAt: time.Now().Add(time.Hour), MaxUses: 1}
	old := fleet.EnrolmentToken{ID: [8]byte{3}, SecretHash: [32]byte{4}, CreatedBy: "user:a", ExpiresAt: time.Now().Add(-time.Hour), MaxUses: 1}
	for _, x := range []fleet.EnrolmentToken{good, old} {
		if err := d.InsertEnrolmentToken(ctx, x); err != nil {
			t.Fatal(err)
		}
	}
	wantCode(t, d.UseEnrolmentToken(ctx, good.ID, [32]byte{9}), fault.NotFound, "unknown_token")
	wantCode(t, d.UseEnrolmentToken(ctx, old.ID, old.SecretHash), fault.Forbidden, "token_expired")
	const racers = 4
	errs := make(chan error, racers)
	for range racers {
		go func() { errs <- d.UseEnrolmentToken(ctx, good.ID, good.SecretHash) }()
	}
	won := 0
	for range racers {
		if err := <-errs; err == nil {
			won++
		} else {
			wantCode(t, err, fault.Forbidden, "token_used_up")
		}
	}
	if won != 1 {
		t.Errorf("a token for one use was used %d times", won)
	}
	if err := d.ReturnEnrolmentToken(ctx, good.ID); err != nil {
		t.Fatal(err)
	}
	if err := d.UseEnrolmentToken(ctx, good.ID, good.SecretHash); err != nil {
		t.Errorf("a returned use: %v", err)
	}
}

func TestPairingsAndAuthority(t *testing.T) {
	t.Parallel()
	d := open(t)
	ctx := t.Context()
	if ca, err := d.ActiveCA(ctx); ca != nil || err != nil {
		t.Fatalf("CA of a new database: %v, %v", ca, err)
	}
	first := fleet.CA{ID: uuid.New(), Fleet: "fleet", CertPEM: "PEM", State: "active"}
	for i, want := range []bool{true, false} {
		ca := first
		if i > 0 {
			ca.ID = uuid.New()
		}
		if stored, err := d.InsertCA(ctx, ca); err != nil || stored != want {
			t.Errorf("CA %d: stored %v, %v", i, stored, err)
		}
	}
	if ca, err := d.ActiveCA(ctx); err != nil || ca == nil || ca.ID != first.ID {
		t.Errorf("active CA: %v, %v", ca, err)
	}
	p := fleet.Pairing{
		ID: uuid.New(), Address: "10.0.0.1:7442", TokenID: [8]byte{1}, Actor: "user:a",
		StartedAt: time.Now().UTC().Truncate(time.Microsecond), State: "running",
	}
	if err := d.RecordPairing(ctx, p); err != nil {
		t.Fatal(err)
	}
	p.State, p.AgentID = "paired", uuid.New()
	if err := d.RecordPairing(ctx, p); err != nil {
		t.Fatal(err)
	}
	list, err := d.Pairings(ctx, 10)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]fleet.Pairing{p}, list); diff != "" {
		t.Errorf("pairings (-want +got):\n%s", diff)
	}
}

func TestUsersTokensAndSessions(t *testing.T) {
	t.Parallel()
	d := open(t)
	ctx := t.Context()
	u, err := d.EnsureUser(ctx, "admin", auth.Admin)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := d.EnsureUser(ctx, "admin", auth.Viewer); err != nil || again.ID != u.ID || again.Role != auth.Admin {
		t.Errorf("the same user: %+v, %v", again, err)
	}
	tok := auth.Token{Name: "up", Role: auth.Admin, Hash: [32]byte{1}, CreatedBy: "user:admin"}
	stored, err := d.EnsureToken(ctx, tok)
	if err != nil || stored.ID == uuid.Nil() {
		t.Fatalf("token: %+v, %v", stored, err)
	}
	if again, err := d.EnsureToken(ctx, tok); err != nil || again.ID != stored.ID {
		t.Errorf("the same token: %+v, %v", again, err)
	}
	used := time.Now().UTC().Truncate(time.Microsecond)
	for _, at := range []time.Time{used, used.Add(time.Second)} {
		if err := d.TouchTokens(ctx, map[uuid.UUID]time.Time{stored.ID: at}); err != nil {
			t.Fatal(err)
		}
	}
	got, err := d.TokenByHash(ctx, tok.Hash)
	if err != nil || !got.LastUsedAt.Equal(used) {
		t.Errorf("token was used at %v, want %v (%v)", got.LastUsedAt, used, err)
	}
	if err := d.RevokeToken(ctx, stored.ID); err != nil {
		t.Fatal(err)
	}
	if list, err := d.Tokens(ctx); err != nil || len(list) != 1 || list[0].RevokedAt.IsZero() {
		t.Errorf("tokens: %+v, %v", list, err)
	}
	_, err = d.TokenByHash(ctx, [32]byte{9})
	wantCode(t, err, fault.NotFound, "unknown_token")
	wantCode(t, d.RevokeToken(ctx, uuid.New()), fault.NotFound, "unknown_token")

	s := auth.Session{Hash: [32]byte{2}, User: u, ExpiresAt: time.Now().Add(time.Hour)}
	dead := auth.Session{Hash: [32]byte{3}, User: u, ExpiresAt: time.Now().Add(-time.Hour)}
	for _, x := range []auth.Session{s, dead} {
		if err := d.InsertSession(ctx, x); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := d.SessionByHash(ctx, s.Hash); err != nil || got.User.ID != u.ID {
		t.Errorf("session: %+v, %v", got, err)
	}
	_, err = d.SessionByHash(ctx, dead.Hash)
	wantCode(t, err, fault.NotFound, "unknown_session")
	if n, err := d.Upkeep(ctx); err != nil || n != 1 {
		t.Errorf("upkeep deleted %d rows (%v), want the expired session", n, err)
	}
	if err := d.DeleteSession(ctx, s.Hash); err != nil {
		t.Fatal(err)
	}
	_, err = d.SessionByHash(ctx, s.Hash)
	wantCode(t, err, fault.NotFound, "unknown_session")
}

func TestSignInLinkWorksOnce(t *testing.T) {
	t.Parallel()
	d := open(t)
	ctx := t.Context()
	u, err := d.EnsureUser(ctx, "admin", auth.Admin)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.InsertSignInLink(ctx, [32]byte{1}, u.ID, time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if err := d.InsertSignInLink(ctx, [32]byte{2}, u.ID, time.Now().Add(-time.Minute)); err != nil {
		t.Fatal(err)
	}
	_, err = d.UseSignInLink(ctx, [32]byte{2})
	wantCode(t, err, fault.NotFound, "unknown_link")
	const racers = 4
	errs := make(chan error, racers)
	for range racers {
		go func() {
			got, err := d.UseSignInLink(ctx, [32]byte{1})
			if err == nil && got.ID != u.ID {
				t.Errorf("the link signed in %s", got.Name)
			}
			errs <- err
		}()
	}
	won := 0
	for range racers {
		if err := <-errs; err == nil {
			won++
		} else {
			wantCode(t, err, fault.NotFound, "unknown_link")
		}
	}
	if won != 1 {
		t.Errorf("one link signed in %d times", won)
	}
}

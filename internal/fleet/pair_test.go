package fleet_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"uuid"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"headgate/internal/agentpb"
	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/internal/fleet/fleettest"
	"headgate/internal/pki"
)

func (h *harness) token() string {
	h.t.Helper()
	text, _, err := h.CreateEnrolmentToken(context.Background(), "user:test", 0, 5)
	if err != nil {
		h.t.Fatal(err)
	}
	return text
}

func TestPairingMakesAMemberThatWorks(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	h.run()
	token := h.token()
	n, address := fleettest.NewNewcomer(t, token)
	v, err := h.Pair(t.Context(), "user:test", address, token)
	if err != nil {
		t.Fatal(err)
	}
	if v.ID != n.ID || v.Status != fleet.Active || v.Name != "newcomer" || v.PairedBy != "user:test" || v.CertSerial == "" {
		t.Errorf("paired %+v", v.Agent)
	}
	h.up(v.Num, 1)
	h.give(v.Num, 1, "1")
	h.final(v.Num, 1)
	h.event("paired", func(e fleet.Event) bool { return e.What == fleet.EventPaired && e.View.ID == n.ID })
	if uses := h.store.TokenUses(); uses != 1 {
		t.Errorf("the token was used %d times", uses)
	}
	history, err := h.Pairings(t.Context(), 10)
	if err != nil || len(history) != 1 || history[0].State != "paired" || history[0].AgentID != n.ID {
		t.Errorf("history %+v, %v", history, err)
	}
	// The same agent again, while its row lives: it is paired, so it does not
	// serve pairing any more.
	if _, err := h.Pair(t.Context(), "user:test", address, token); fault.CodeOf(err) != fleet.CodeNoPairingMode {
		t.Errorf("second pairing: %v", err)
	}
	if uses := h.store.TokenUses(); uses != 1 {
		t.Errorf("no proof was tried, but the token has %d uses", uses)
	}
}

// TestPairingFailuresAreToldApart also checks which of them use up the token.
func TestPairingFailuresAreToldApart(t *testing.T) {
	t.Parallel()
	foreign := newHarness(t, quick(), nil)
	cases := map[string]struct {
		prepare func(h *harness, token string) (address, useToken string)
		code    string
		uses    int
	}{
		"nobody listens": {func(h *harness, token string) (string, string) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				h.t.Fatal(err)
			}
			defer l.Close()
			return l.Addr().String(), token
		}, fleet.CodeNoPairingMode, 0},
		"something else listens": {func(h *harness, token string) (string, string) {
			return chatter(h.t, "220 mail.example.org ESMTP\r\n"), token
		}, fleet.CodeNoPairingMode, 0},
		"another token": {func(h *harness, token string) (string, string) {
			_, address := fleettest.NewNewcomer(h.t, h.token())
			return address, token
		}, fleet.CodeWrongToken, 1},
		"a token of another fleet here": {func(h *harness, token string) (string, string) {
			_, address := fleettest.NewNewcomer(h.t, token)
			return address, foreign.token()
		}, fleet.CodeForeignToken, 0},
		"a token of another fleet there": {func(h *harness, token string) (string, string) {
			_, address := fleettest.NewNewcomer(h.t, foreign.token())
			return address, token
		}, fleet.CodeForeignToken, 0},
		"not a token": {func(h *harness, token string) (string, string) { return "127.0.0.1:1", token[:50] }, "invalid_enrolment_token", 0},
		"an unknown token": {func(h *harness, _ string) (string, string) {
			return "127.0.0.1:1", pki.NewToken(pki.SPKI(h.authority.Certificate())).Reveal()
		}, "unknown_token", 0},
		"locked": {func(h *harness, token string) (string, string) {
			n, address := fleettest.NewNewcomer(h.t, token)
			n.Step = failAt("confirm", status.Error(codes.Unauthenticated, "WRONG_SECRET Something; 0 tries left."))
			return address, token
		}, fleet.CodePairingLocked, 1},
		"busy": {func(h *harness, token string) (string, string) {
			n, address := fleettest.NewNewcomer(h.t, token)
			n.Step = failAt("hello", status.Error(codes.ResourceExhausted, "BUSY Another one."))
			return address, token
		}, fleet.CodePairingBusy, 0},
		"breaks off": {func(h *harness, token string) (string, string) {
			n, address := fleettest.NewNewcomer(h.t, token)
			n.Step = failAt("confirm", status.Error(codes.Aborted, "<b>text of a stranger</b>"))
			return address, token
		}, fleet.CodePairingBroken, 1},
		"a request for another key": {func(h *harness, token string) (string, string) {
			n, address := fleettest.NewNewcomer(h.t, token)
			key, err := pki.NewKey()
			if err != nil {
				h.t.Fatal(err)
			}
			if n.CSR, err = pki.NewRequest(key); err != nil {
				h.t.Fatal(err)
			}
			return address, token
		}, fleet.CodePairingBroken, 1},
		"a scheme":     {func(_ *harness, token string) (string, string) { return "unix:/run/x", token }, "invalid_address", 0},
		"a link-local": {func(_ *harness, token string) (string, string) { return "169.254.169.254:80", token }, fleet.CodeAddressRefused, 0},
		"metadata":     {func(_ *harness, token string) (string, string) { return "[fd00:ec2::254]:80", token }, fleet.CodeAddressRefused, 0},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, quick(), nil)
			h.run()
			address, token := c.prepare(h, h.token())
			_, err := h.Pair(t.Context(), "user:test", address, token)
			if fault.CodeOf(err) != c.code {
				t.Fatalf("got %v, want %s", err, c.code)
			}
			if e, _ := errors.AsType[*fault.Error](err); strings.Contains(e.Message+e.Hint, "stranger") || strings.Contains(e.Message, "mail") {
				t.Errorf("repeats what a stranger said: %s", e.Message)
			}
			if uses := h.store.TokenUses(); uses != c.uses {
				t.Errorf("%d uses of tokens, want %d", uses, c.uses)
			}
			if rows, err := h.store.Agents(t.Context()); err != nil || len(rows) != 0 {
				t.Errorf("rows left behind: %v, %v", rows, err)
			}
		})
	}
}

func failAt(step string, err error) func(string) error {
	return func(s string) error {
		if s == step {
			return err
		}
		return nil
	}
}

// chatter is a server that greets and reads on.
func chatter(t testing.TB, greeting string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer c.Close()
				_, _ = io.WriteString(c, greeting)
				_, _ = io.Copy(io.Discard, c)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		all.Wait()
	})
	return l.Addr().String()
}

func TestLoopbackNeedsPermission(t *testing.T) {
	t.Parallel()
	var dialled atomic.Int64
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	accepted := make(chan struct{})
	go func() {
		defer close(accepted)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			dialled.Add(1)
			_ = c.Close()
		}
	}()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	h := newHarness(t, quick(), func(c *fleet.Config) { c.AllowLoopback = false })
	h.run()
	for _, host := range []string{"127.0.0.1", "localhost", "127.8.9.10", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "[::]", "[64:ff9b::7f00:1]"} {
		_, err := h.Pair(t.Context(), "user:test", host+":"+port, h.token())
		if fault.CodeOf(err) != fleet.CodeAddressRefused {
			t.Errorf("%s: %v", host, err)
		}
	}
	row := h.store.Add(fleettest.NewAgent(t, h.authority, "a").Row(l.Addr().String()))
	if err := h.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.trouble(row.ID, fleet.CauseAddressRefused)
	_ = l.Close()
	<-accepted
	if n := dialled.Load(); n != 0 {
		t.Errorf("%d connections arrived", n)
	}
}

// TestARelayInTheMiddleLearnsNothing: somebody who ends TLS on both sides and
// passes every message on. He must present a certificate of the fleet to the
// agent, so he is even given a stolen controller key here.
func TestARelayInTheMiddleLearnsNothing(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	h.run()
	token := h.token()
	n, address := fleettest.NewNewcomer(t, token)
	relay := startRelay(t, h, n.ID, address)
	_, err := h.Pair(t.Context(), "user:test", relay, token)
	if fault.CodeOf(err) != fleet.CodeWrongToken {
		t.Fatalf("got %v", err)
	}
	if n.Paired() {
		t.Error("the agent was enrolled through the relay")
	}
	if rows, err := h.store.Agents(t.Context()); err != nil || len(rows) != 0 {
		t.Errorf("rows left behind: %v, %v", rows, err)
	}
	// Directly, the same token and agent still work.
	if _, err := h.Pair(t.Context(), "user:test", address, token); err != nil {
		t.Error(err)
	}
}

type relay struct {
	agentpb.UnimplementedPairingServer
	agent agentpb.PairingClient
}

func (r relay) Pair(down grpc.BidiStreamingServer[agentpb.PairRequest, agentpb.PairReply]) error {
	up, err := r.agent.Pair(down.Context())
	if err != nil {
		return err
	}
	for {
		in, err := down.Recv()
		if err != nil {
			return err
		}
		if err := up.Send(in); err != nil {
			return err
		}
		out, err := up.Recv()
		if err != nil {
			return err
		}
		if err := down.Send(out); err != nil {
			return err
		}
	}
}

func startRelay(t *testing.T, h *harness, agent uuid.UUID, address string) string {
	t.Helper()
	face, err := pki.NewAgentIdentity(agent, time.Now()) // claims the agent's id
	if err != nil {
		t.Fatal(err)
	}
	up, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(credentials.NewTLS(pki.DialPairing(h.Identity()))))
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(grpc.Creds(credentials.NewTLS(pki.PairingServer(face))))
	agentpb.RegisterPairingServer(s, relay{agent: agentpb.NewPairingClient(up)})
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l) // ends by Stop
	}()
	t.Cleanup(func() {
		s.Stop()
		<-done
		_ = up.Close()
	})
	return l.Addr().String()
}

// TestALostDoneIsSettledByOneDial: the agent has its certificate, but its word
// does not arrive.
func TestALostDoneIsSettledByOneDial(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	h.run()
	token := h.token()
	n, address := fleettest.NewNewcomer(t, token)
	n.Step = failAt("done", status.Error(codes.Unavailable, "gone"))
	v, err := h.Pair(t.Context(), "user:test", address, token)
	if err != nil || v.Status != fleet.Active {
		t.Fatalf("%+v, %v", v.Agent, err)
	}
	h.up(v.Num, 1)
}

// TestAnInterruptedPairingCanBeRepeated: the run ends before the agent has
// stored anything; the row that it left behind does not stand in the way.
func TestAnInterruptedPairingCanBeRepeated(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	h.run()
	token := h.token()
	n, address := fleettest.NewNewcomer(t, token)
	var fail atomic.Bool
	fail.Store(true)
	n.Step = func(step string) error {
		if step == "store" && fail.Load() {
			return status.Error(codes.Unavailable, "killed")
		}
		return nil
	}
	if _, err := h.Pair(t.Context(), "user:test", address, token); fault.CodeOf(err) != fleet.CodePairingPending {
		t.Fatalf("got %v", err)
	}
	if views, err := h.List(fleet.Filter{}); err != nil || len(views) != 0 {
		t.Errorf("an agent that is enrolling is listed: %v, %v", views, err)
	}
	fail.Store(false)
	v, err := h.Pair(t.Context(), "user:test", address, token)
	if err != nil {
		t.Fatal(err)
	}
	h.up(v.Num, 1)
}

// TestAnEnrolmentIsSettledAfterARestart: the controller stopped between Enrol
// and Done. The agent that has its certificate becomes active.
func TestAnEnrolmentIsSettledAfterARestart(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	a := fleettest.NewAgent(t, h.authority, "a")
	row := a.Row(a.Start(t))
	row.Status, row.PairedAt = fleet.Enrolling, time.Now().Add(-time.Minute)
	row = h.store.Add(row)
	lost := fleettest.NewAgent(t, h.authority, "lost").Row("127.0.0.1:1")
	lost.Status, lost.PairedAt = fleet.Enrolling, time.Now().Add(-fleet.EnrolKeep-time.Minute)
	lost = h.store.Add(lost)
	h.run()
	h.up(row.Num, 1)
	if stored := h.store.Row(row.Num); stored.Status != fleet.Active {
		t.Errorf("status %s", stored.Status)
	}
	look := time.NewTicker(5 * time.Millisecond)
	defer look.Stop()
	for h.store.Row(lost.Num).Status != fleet.Removed {
		select {
		case <-look.C:
		case <-t.Context().Done():
			t.Fatal("the lost one was not swept")
		}
	}
}

// TestAKnownIDWithAnotherKeyIsRefused: the old agent must be removed first.
func TestAKnownIDWithAnotherKeyIsRefused(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	token := h.token()
	n, address := fleettest.NewNewcomer(t, token)
	h.store.Add(fleet.Agent{ID: n.ID, Name: "old", SPKI: [32]byte{1}, Status: fleet.Active, Addresses: []string{"127.0.0.1:1"}})
	h.run()
	if _, err := h.Pair(t.Context(), "user:test", address, token); fault.CodeOf(err) != "agent_exists" {
		t.Fatalf("got %v", err)
	}
	if err := h.Remove(t.Context(), n.ID, "user:test"); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Pair(t.Context(), "user:test", address, token); err != nil {
		t.Fatal(err)
	}
}

func TestPairingsAreLimitedPerUser(t *testing.T) {
	t.Parallel()
	limits := quick()
	limits.PairsPerMinute = 3
	h := newHarness(t, limits, nil)
	h.run()
	codes := []string{}
	for range 4 {
		_, err := h.Pair(t.Context(), "user:a", "169.254.0.1:1", h.token())
		codes = append(codes, fault.CodeOf(err))
	}
	want := []string{fleet.CodeAddressRefused, fleet.CodeAddressRefused, fleet.CodeAddressRefused, fleet.CodePairingRate}
	if !slices.Equal(codes, want) {
		t.Errorf("got %v", codes)
	}
	if _, err := h.Pair(t.Context(), "user:b", "169.254.0.1:1", h.token()); fault.CodeOf(err) != fleet.CodeAddressRefused {
		t.Errorf("another user: %v", err)
	}
}

func TestTokenLimits(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	for _, c := range []struct {
		life time.Duration
		uses int
	}{{25 * time.Hour, 1}, {-time.Hour, 1}, {time.Hour, -1}, {time.Hour, 1001}} {
		if _, _, err := h.CreateEnrolmentToken(t.Context(), "a", c.life, c.uses); fault.CodeOf(err) != fleet.CodeInvalidLifetime {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// TestDialFailuresAreToldApart dials one row of the table after another.
func TestDialFailuresAreToldApart(t *testing.T) {
	t.Parallel()
	limits := quick()
	limits.ConnectTimeout = 700 * time.Millisecond
	h := newHarness(t, limits, nil)
	foreign := newHarness(t, quick(), nil)
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refused := closed.Addr().String()
	_ = closed.Close()
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mute.Close() })

	serve := func(edit func(*fleettest.Agent)) (*fleettest.Agent, string) {
		a := fleettest.NewAgent(t, h.authority, "a")
		edit(a)
		return a, a.Start(t)
	}
	plain := func(*fleettest.Agent) {}
	_, others := serve(plain)
	own := fleettest.NewAgent(t, h.authority, "a")
	changed, changedAt := serve(plain)
	changed.Identity = own.Identity // the row pins another key
	expired, expiredAt := serve(func(a *fleettest.Agent) { a.Identity = dated(t, h, a, -40*24*time.Hour) })
	early, earlyAt := serve(func(a *fleettest.Agent) { a.Identity = dated(t, h, a, 24*time.Hour) })
	unknown := fleettest.NewAgent(t, foreign.authority, "a")
	unknownAt := unknown.Start(t)
	lost := fleettest.NewAgent(t, h.authority, "a") // trusts another fleet now
	lost.Roots = foreign.Roots()
	lostAt := lost.Start(t)
	web, webAt := serve(func(a *fleettest.Agent) {
		a.TLS = &tls.Config{GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return &tls.Certificate{Certificate: [][]byte{a.Identity.Leaf().Raw}, PrivateKey: a.Identity.Key()}, nil
		}, MaxVersion: tls.VersionTLS12}
	})
	cases := []struct {
		name    string
		agent   *fleettest.Agent
		address string
		cause   string
	}{
		{"refused", own, refused, fleet.CauseRefused},
		{"silent", fleettest.NewAgent(t, h.authority, "a"), mute.Addr().String(), fleet.CauseTimeout},
		{"no TLS", fleettest.NewAgent(t, h.authority, "a"), chatter(t, "HTTP/1.1 400 Bad Request\r\n\r\n"), fleet.CauseNotAnAgent},
		{"old TLS", web, webAt, fleet.CauseNotAnAgent},
		{"other agent", fleettest.NewAgent(t, h.authority, "a"), others, fleet.CauseOtherAgent},
		{"key changed", changed, changedAt, fleet.CauseKeyChanged},
		{"expired", expired, expiredAt, fleet.CauseExpired},
		{"not yet valid", early, earlyAt, fleet.CauseNotYetValid},
		{"unknown CA", unknown, unknownAt, fleet.CauseUnknownCA},
		{"controller denied", lost, lostAt, fleet.CauseControllerDenied},
		{"no such host", fleettest.NewAgent(t, h.authority, "a"), "no-such-host.invalid:7442", fleet.CauseNoSuchHost},
	}
	rows := make([]fleet.Agent, len(cases))
	for i, c := range cases {
		rows[i] = h.store.Add(c.agent.Row(c.address))
	}
	none := h.store.Add(fleettest.NewAgent(t, h.authority, "a").Row())
	h.run()
	for i, c := range cases {
		if v := h.trouble(rows[i].ID, c.cause); v.Live.Sentence == "" {
			t.Errorf("%s: no sentence", c.name)
		}
	}
	h.trouble(none.ID, fleet.CauseNoAddress)
}

// dated gives the agent a certificate that was issued at another time.
func dated(t *testing.T, h *harness, a *fleettest.Agent, shift time.Duration) *pki.Identity {
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	cert, err := h.authority.IssueAgent(&key.PublicKey, a.ID, time.Now().Add(shift))
	if err != nil {
		t.Fatal(err)
	}
	id, err := pki.NewIdentity(key, cert)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

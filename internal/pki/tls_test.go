package pki_test

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"uuid"

	"headgate/internal/fault"
	"headgate/internal/pki"
)

func TestAgentHandshakeAdmitsControllersOfItsFleetOnly(t *testing.T) {
	t.Parallel()
	f, foreign := newFleet(t, "fleet-a"), newFleet(t, "fleet-a")
	withClient := func(id *pki.Identity) *tls.Config {
		d := f.dial()
		d.Identity = id
		return pki.DialAgent(d)
	}
	selfMade := must[*pki.Identity](t)(pki.NewAgentIdentity(f.controllerID, time.Now()))
	portKey := newKey(t)
	port := must[*pki.Identity](t)(pki.NewIdentity(portKey,
		must[*x509.Certificate](t)(f.ca.IssueControllerPort(&portKey.PublicKey, f.controllerID, nil, time.Now()))))
	old := pki.DialAgent(f.dial())
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	anonymous := pki.DialAgent(f.dial())
	anonymous.GetClientCertificate = nil

	for name, tc := range map[string]struct {
		client *tls.Config
		ok     bool
	}{
		"controller":                        {pki.DialAgent(f.dial()), true},
		"stolen agent certificate":          {withClient(f.agent), false},
		"controller of another CA":          {withClient(foreign.controller), false},
		"self-made certificate":             {withClient(selfMade), false},
		"controller port certificate":       {withClient(port), false},
		"expired controller":                {withClient(f.newController(t, f.controllerID, time.Now().Add(-8*24*time.Hour))), false},
		"controller with clock far ahead":   {withClient(f.newController(t, f.controllerID, time.Now().Add(time.Hour))), false},
		"controller with clock a bit ahead": {withClient(f.newController(t, f.controllerID, time.Now().Add(4*time.Minute))), true},
		"TLS 1.2":                           {old, false},
		"no certificate":                    {anonymous, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, _, serverErr, clientErr := shake(t, pki.AgentServer(f.agent, f.roots), tc.client)
			if tc.ok != (serverErr == nil) || tc.ok != (clientErr == nil) {
				t.Fatalf("server: %v, client: %v, want ok = %v", serverErr, clientErr, tc.ok)
			}
		})
	}
}

func TestDialTellsApartWhoAnswers(t *testing.T) {
	t.Parallel()
	f, foreign := newFleet(t, "fleet-a"), newFleet(t, "fleet-b")
	unpaired := must[*pki.Identity](t)(pki.NewAgentIdentity(f.agentID, time.Now()))
	portOnly := must[*pki.Identity](t)(pki.NewPortIdentity(f.controllerID, nil, time.Now()))
	tls12 := pki.AgentServer(f.agent, f.roots)
	tls12 = must[*tls.Config](t)(tls12.GetConfigForClient(nil))
	tls12.MinVersion, tls12.MaxVersion = tls.VersionTLS12, tls.VersionTLS12

	for name, tc := range map[string]struct {
		server *tls.Config
		want   string // fault code, empty for success
	}{
		"the agent":                   {pki.AgentServer(f.agent, f.roots), ""},
		"another agent of the fleet":  {pki.AgentServer(f.newAgent(t, uuid.New(), time.Now()), f.roots), pki.CodeOtherAgent},
		"the same id with a new key":  {pki.AgentServer(f.newAgent(t, f.agentID, time.Now()), f.roots), pki.CodeKeyChanged},
		"expired":                     {pki.AgentServer(f.newAgent(t, f.agentID, time.Now().Add(-31*24*time.Hour)), f.roots), pki.CodeAgentExpired},
		"from the future":             {pki.AgentServer(f.newAgent(t, f.agentID, time.Now().Add(time.Hour)), f.roots), pki.CodeAgentNotYetValid},
		"agent of another fleet":      {pki.AgentServer(foreign.agent, foreign.roots), pki.CodeAgentNotOurs},
		"the id under another CA":     {pki.AgentServer(foreign.newAgent(t, f.agentID, time.Now()), foreign.roots), pki.CodeAgentNotOurs},
		"unpaired":                    {pki.PairingServer(unpaired), pki.CodeAgentNotOurs},
		"controller used as server":   {pki.AgentServer(f.controller, f.roots), pki.CodeNotAnAgent},
		"some other TLS server":       {pki.PairingServer(portOnly), pki.CodeNotAnAgent},
		"a server without TLS 1.3":    {tls12, pki.CodeNotAnAgent},
		"agent that left for another": {pki.AgentServer(f.agent, foreign.roots), pki.CodeRefusedByAgent},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, _, _, err := shake(t, tc.server, pki.DialAgent(f.dial()))
			err = f.dial().Explain(err)
			if tc.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if fault.CodeOf(err) != tc.want {
				t.Fatalf("got %v, want code %s", err, tc.want)
			}
		})
	}
}

func TestDialExplainsAServerThatSpeaksNoTLS(t *testing.T) {
	t.Parallel()
	f := newFleet(t, "fleet-a")
	s, c := connect(t, pki.AgentServer(f.agent, f.roots), pki.DialAgent(f.dial()))
	if _, err := s.NetConn().Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	if err := f.dial().Explain(c.Handshake()); fault.CodeOf(err) != pki.CodeNotAnAgent {
		t.Fatalf("got %v", err)
	}
	_, c = connect(t, pki.AgentServer(f.agent, f.roots), pki.DialAgent(f.dial()))
	if err := c.SetDeadline(time.Now().Add(time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if err := f.dial().Explain(c.Handshake()); fault.CodeOf(err) != pki.CodeHandshakeTimeout {
		t.Fatalf("got %v", err)
	}
}

func TestRenewedKeyIsAcceptedThroughTheSecondPin(t *testing.T) {
	t.Parallel()
	f := newFleet(t, "fleet-a")
	server := pki.AgentServer(f.agent, f.roots)
	key := newKey(t)
	next := must[*x509.Certificate](t)(f.ca.IssueAgent(&key.PublicKey, f.agentID, time.Now()))
	d := f.dial()
	d.Pins = append(d.Pins, pki.SPKI(next))
	for range 2 { // once with the old key, once with the new one, on the same configurations
		if _, _, serverErr, err := shake(t, server, pki.DialAgent(d)); err != nil || serverErr != nil {
			t.Fatal(err, serverErr)
		}
		if err := f.agent.Set(key, next); err != nil {
			t.Fatal(err)
		}
	}
}

func TestNoSessionIsResumed(t *testing.T) {
	t.Parallel()
	f := newFleet(t, "fleet-a")
	client := pki.DialAgent(f.dial())
	client.ClientSessionCache = tls.NewLRUClientSessionCache(4)
	client.SessionTicketsDisabled = false
	for range 3 {
		_, c, _, err := shake(t, pki.AgentServer(f.agent, f.roots), client)
		if err != nil || c.ConnectionState().DidResume {
			t.Fatalf("err %v, resumed %v", err, c.ConnectionState().DidResume)
		}
	}
}

func TestControllerPortVerifiesByNameAndAddress(t *testing.T) {
	t.Parallel()
	f := newFleet(t, "fleet-a")
	identity := must[*pki.Identity](t)(pki.NewPortIdentity(f.controllerID, nil, time.Now()))
	roots := &pki.Roots{}
	server := pki.ControllerPort(identity, roots)

	byAddress := func(name string) *tls.Config {
		c := pki.Client(f.roots)
		c.ServerName = name
		return c
	}
	if _, _, _, err := shake(t, server, byAddress("127.0.0.1")); err == nil {
		t.Fatal("the stop-gap certificate was taken for one of the fleet")
	}
	key := newKey(t)
	listening := []netip.Addr{netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("::"), netip.MustParseAddr("127.0.0.1")}
	leaf := must[*x509.Certificate](t)(f.ca.IssueControllerPort(&key.PublicKey, f.controllerID, listening, time.Now()))
	if len(leaf.IPAddresses) != 3 {
		t.Fatalf("addresses %v", leaf.IPAddresses)
	}
	if err := identity.Set(key, leaf); err != nil {
		t.Fatal(err)
	}
	roots.Set(f.ca.Certificate())

	for _, name := range []string{"127.0.0.1", "::1", "10.1.2.3", pki.ControllerName(f.controllerID)} {
		s, _, serverErr, err := shake(t, server, byAddress(name))
		if err != nil || serverErr != nil {
			t.Fatalf("%s: %v, %v", name, err, serverErr)
		}
		if len(s.ConnectionState().PeerCertificates) != 0 {
			t.Fatal("a client without certificate has one")
		}
	}
	for _, name := range []string{"10.9.9.9", "localhost", pki.ControllerName(uuid.New())} {
		if _, _, _, err := shake(t, server, byAddress(name)); err == nil {
			t.Fatalf("%s was accepted", name)
		}
	}
	s, _, serverErr, err := shake(t, server, pki.DialController(f.controller, f.roots, f.controllerID))
	if err != nil || serverErr != nil {
		t.Fatal(err, serverErr)
	}
	if p, err := pki.PeerOf(s.ConnectionState().PeerCertificates[0]); err != nil || p.ID != f.controllerID || p.Role != pki.RoleController || p.Fleet != "fleet-a" {
		t.Fatalf("peer %+v, %v", p, err)
	}
	if _, _, serverErr, _ := shake(t, server, pki.DialController(f.agent, f.roots, f.controllerID)); serverErr == nil {
		t.Fatal("an agent's certificate was accepted on the controller port")
	}
}

func TestSwitchingPicksTheRulesPerConnection(t *testing.T) {
	t.Parallel()
	f := newFleet(t, "fleet-a")
	paired := false
	server := pki.Switching(func() *tls.Config {
		if paired {
			return pki.AgentServer(f.agent, f.roots)
		}
		return pki.PairingServer(f.agent)
	})
	anonymous := pki.DialPairing(f.controller)
	anonymous.GetClientCertificate = nil
	if _, _, serverErr, err := shake(t, server, anonymous); err != nil || serverErr != nil {
		t.Fatal(err, serverErr)
	}
	paired = true
	if _, _, serverErr, _ := shake(t, server, anonymous); serverErr == nil {
		t.Fatal("a dialler without certificate was accepted after pairing")
	}
	if _, _, serverErr, err := shake(t, server, pki.DialAgent(f.dial())); err != nil || serverErr != nil {
		t.Fatal(err, serverErr)
	}
}

func TestPairingDialRefusesWhatIsNoAgent(t *testing.T) {
	t.Parallel()
	f := newFleet(t, "fleet-a")
	port := must[*pki.Identity](t)(pki.NewPortIdentity(f.controllerID, nil, time.Now()))
	if _, _, _, err := shake(t, pki.PairingServer(port), pki.DialPairing(f.controller)); fault.CodeOf(err) != pki.CodeNotAnAgent {
		t.Fatalf("got %v", err)
	}
}

func TestPublicPortServesTheOperatorsFiles(t *testing.T) {
	t.Parallel()
	f := newFleet(t, "fleet-a")
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	if _, err := pki.PublicPort(certFile, keyFile, nil); fault.CodeOf(err) != "public_certificate_unusable" {
		t.Fatalf("got %v", err)
	}
	d := must[*pki.Dir](t)(pki.OpenDir(dir))
	defer d.Close()
	key := newKey(t)
	leaf := must[*x509.Certificate](t)(f.ca.IssueControllerPort(&key.PublicKey, f.controllerID, nil, time.Now()))
	if err := must[*pki.Identity](t)(pki.NewIdentity(key, leaf)).Save(d, "both.pem"); err != nil {
		t.Fatal(err)
	}
	both := must[[]byte](t)(os.ReadFile(filepath.Join(dir, "both.pem")))
	for _, name := range []string{certFile, keyFile} {
		if err := os.WriteFile(name, both, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	server := must[*tls.Config](t)(pki.PublicPort(certFile, keyFile, nil))
	client := pki.Client(f.roots)
	client.ServerName = net.IPv6loopback.String()
	client.MaxVersion, client.MinVersion = tls.VersionTLS12, tls.VersionTLS12
	if _, _, serverErr, err := shake(t, server, client); err != nil || serverErr != nil {
		t.Fatal(err, serverErr)
	}
	client.MaxVersion, client.MinVersion = tls.VersionTLS11, tls.VersionTLS10
	if _, _, serverErr, _ := shake(t, server, client); serverErr == nil {
		t.Fatal("TLS 1.1 was accepted")
	}
}

func TestSelfClientTakesOnlyWhatIsServed(t *testing.T) {
	t.Parallel()
	now := time.Now()
	port := func() *tls.Config {
		return pki.ControllerPort(must[*pki.Identity](t)(pki.NewPortIdentity(uuid.NewV4(), nil, now)), pki.NewRoots())
	}
	own, other := port(), port()
	if _, _, serverErr, clientErr := shake(t, own, pki.SelfClient(own)); serverErr != nil || clientErr != nil {
		t.Errorf("its own: %v, %v", serverErr, clientErr)
	}
	if _, _, _, err := shake(t, own, pki.SelfClient(other)); err == nil || !strings.Contains(err.Error(), "another certificate") {
		t.Errorf("another's: %v", err)
	}
}

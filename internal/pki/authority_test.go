package pki_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io/fs"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"uuid"

	"github.com/google/go-cmp/cmp"

	"headgate/internal/fault"
	"headgate/internal/pki"
)

func TestAuthorityIsNarrow(t *testing.T) {
	t.Parallel()
	now := time.Now()
	ca := must[*pki.Authority](t)(pki.NewAuthority("fleet-a", now)).Certificate()
	if !ca.IsCA || !ca.MaxPathLenZero || ca.MaxPathLen != 0 || !ca.PermittedDNSDomainsCritical || ca.KeyUsage&x509.KeyUsageDigitalSignature != 0 {
		t.Errorf("constraints: %+v", ca)
	}
	if years := ca.NotAfter.Sub(now).Hours() / 24 / 365; years < 4.99 || years > 5.01 {
		t.Errorf("lives %f years", years)
	}
	for _, bad := range []string{"", "A", "10.0.0.1", "::1", "a..b", "-a", "a-", "a-.b", "a/b", "a b", "ä", strings.Repeat("a", 64)} {
		if _, err := pki.NewAuthority(bad, now); fault.CodeOf(err) != "invalid_fleet_name" {
			t.Errorf("%q: %v", bad, err)
		}
	}
	must[*pki.Authority](t)(pki.NewAuthority("a-1.example", now))
}

// TestNameConstraintsHold signs with the CA's own key what Headgate would
// never sign, as a thief of the key would, and expects verifiers to refuse it.
func TestNameConstraintsHold(t *testing.T) {
	t.Parallel()
	dir := must[*pki.Dir](t)(pki.OpenDir(t.TempDir()))
	defer dir.Close()
	ca := must[*pki.Authority](t)(pki.NewAuthority("fleet-a", time.Now()))
	if err := ca.SaveKey(dir); err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(must[[]byte](t)(dir.ReadKey(ca.KeyFile())))
	caKey := must[any](t)(x509.ParsePKCS8PrivateKey(block.Bytes))
	uri := func(s string) []*url.URL { return []*url.URL{must[*url.URL](t)(url.Parse(s))} }
	for name, tc := range map[string]struct {
		template x509.Certificate
		ok       bool
	}{
		"inside":             {x509.Certificate{DNSNames: []string{"x.agent.headgate.internal"}, URIs: uri("spiffe://fleet-a/agent/x")}, true},
		"inside with IP":     {x509.Certificate{DNSNames: []string{"x.controller.headgate.internal"}, IPAddresses: []net.IP{net.IPv6loopback}}, true},
		"foreign DNS name":   {x509.Certificate{DNSNames: []string{"www.example.com"}}, false},
		"lookalike":          {x509.Certificate{DNSNames: []string{"evilheadgate.internal"}}, false},
		"foreign trust name": {x509.Certificate{DNSNames: []string{"x.agent.headgate.internal"}, URIs: uri("spiffe://fleet-b/agent/x")}, false},
		"another CA":         {x509.Certificate{DNSNames: []string{"x.agent.headgate.internal"}, IsCA: true, BasicConstraintsValid: true}, true},
	} {
		key := newKey(t)
		tc.template.SerialNumber, tc.template.NotBefore, tc.template.NotAfter = big.NewInt(7), time.Now().Add(-time.Minute), time.Now().Add(time.Hour)
		der := must[[]byte](t)(x509.CreateCertificate(rand.Reader, &tc.template, ca.Certificate(), &key.PublicKey, caKey))
		cert := must[*x509.Certificate](t)(x509.ParseCertificate(der))
		roots := x509.NewCertPool()
		roots.AddCert(ca.Certificate())
		_, err := cert.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
		if tc.ok != (err == nil) {
			t.Errorf("%s: %v", name, err)
		}
		if !tc.template.IsCA {
			continue
		}
		grandchild := x509.Certificate{SerialNumber: big.NewInt(8), NotBefore: tc.template.NotBefore, NotAfter: tc.template.NotAfter, DNSNames: []string{"y.agent.headgate.internal"}}
		leaf := must[*x509.Certificate](t)(x509.ParseCertificate(must[[]byte](t)(x509.CreateCertificate(rand.Reader, &grandchild, cert, &key.PublicKey, key))))
		intermediates := x509.NewCertPool()
		intermediates.AddCert(cert)
		if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, Intermediates: intermediates, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err == nil {
			t.Errorf("an intermediate authority was accepted")
		}
	}
}

func TestLeavesCarryWhatTheirRoleNeedsAndNoMore(t *testing.T) {
	t.Parallel()
	ca := must[*pki.Authority](t)(pki.NewAuthority("fleet-a", time.Now()))
	id, key, now := uuid.New(), newKey(t), time.Now()
	agent := must[*x509.Certificate](t)(ca.IssueAgent(&key.PublicKey, id, now))
	controller := must[*x509.Certificate](t)(ca.IssueController(&key.PublicKey, id, now))
	port := must[*x509.Certificate](t)(ca.IssueControllerPort(&key.PublicKey, id, nil, now))
	for _, tc := range []struct {
		cert  *x509.Certificate
		role  pki.Role
		usage x509.ExtKeyUsage
		days  int
		ips   int
	}{
		{agent, pki.RoleAgent, x509.ExtKeyUsageServerAuth, 30, 0},
		{controller, pki.RoleController, x509.ExtKeyUsageClientAuth, 7, 0},
		{port, pki.RoleController, x509.ExtKeyUsageServerAuth, 7, 2},
	} {
		if got, err := pki.PeerOf(tc.cert); err != nil || got != (pki.Peer{Role: tc.role, ID: id, Fleet: "fleet-a"}) {
			t.Errorf("%+v, %v", got, err)
		}
		if diff := cmp.Diff([]x509.ExtKeyUsage{tc.usage}, tc.cert.ExtKeyUsage); diff != "" {
			t.Error(diff)
		}
		if life := tc.cert.NotAfter.Sub(now); tc.cert.IsCA || len(tc.cert.IPAddresses) != tc.ips || life > time.Duration(tc.days)*24*time.Hour || life < time.Duration(tc.days)*24*time.Hour-time.Second {
			t.Errorf("%s: CA %v, %v, lives %v", tc.role, tc.cert.IsCA, tc.cert.IPAddresses, life)
		}
		if back := now.Sub(tc.cert.NotBefore); back < 4*time.Minute || tc.cert.SerialNumber.BitLen() > 127 || tc.cert.SerialNumber.BitLen() < 64 {
			t.Errorf("back %v, serial of %d bits", back, tc.cert.SerialNumber.BitLen())
		}
		part := float64(pki.RenewAt(tc.cert).Sub(tc.cert.NotBefore)) / float64(tc.cert.NotAfter.Sub(tc.cert.NotBefore))
		middle := map[pki.Role]float64{pki.RoleAgent: 2.0 / 3, pki.RoleController: 0.5}[tc.role]
		if part < middle-0.101 || part > middle+0.101 {
			t.Errorf("%s is renewed at %f of its life", tc.role, part)
		}
	}
}

func TestLeafNeverOutlivesItsAuthority(t *testing.T) {
	t.Parallel()
	now := time.Now()
	ca := must[*pki.Authority](t)(pki.NewAuthority("fleet-a", now.Add(-5*365*24*time.Hour+48*time.Hour)))
	key := newKey(t)
	cert := must[*x509.Certificate](t)(ca.IssueAgent(&key.PublicKey, uuid.New(), now))
	if !cert.NotAfter.Equal(ca.Certificate().NotAfter) {
		t.Errorf("leaf ends %v, authority %v", cert.NotAfter, ca.Certificate().NotAfter)
	}
	if _, err := ca.IssueAgent(&key.PublicKey, uuid.New(), now.Add(49*time.Hour)); fault.CodeOf(err) != "ca_expired" {
		t.Errorf("got %v", err)
	}
	if _, err := ca.IssueAgent(&key.PublicKey, uuid.Nil(), now); err == nil {
		t.Error("a certificate without id was issued")
	}
}

func TestOnlyTheKeyIsTakenFromARequest(t *testing.T) {
	t.Parallel()
	key := newKey(t)
	r, err := pki.ParseRequest(must[[]byte](t)(pki.NewRequest(key)))
	if err != nil || !r.Key.Equal(&key.PublicKey) || len(r.Ignored) != 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	greedy := &x509.CertificateRequest{Subject: pkix.Name{CommonName: "admin"}, DNSNames: []string{"x.controller.headgate.internal"}}
	der := must[[]byte](t)(x509.CreateCertificateRequest(rand.Reader, greedy, key))
	if r, err := pki.ParseRequest(der); err != nil || len(r.Ignored) != 2 {
		t.Fatalf("%+v, %v", r, err)
	}
	der[len(der)-1] ^= 1
	p384 := must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P384(), rand.Reader))
	for name, bad := range map[string][]byte{
		"bad signature": der, "empty": nil, "other curve": must[[]byte](t)(x509.CreateCertificateRequest(rand.Reader, greedy, p384)),
	} {
		if _, err := pki.ParseRequest(bad); fault.CodeOf(err) != "csr_invalid" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPeerRefusesContradictingNames(t *testing.T) {
	t.Parallel()
	id := uuid.New()
	uri := func(s string) []*url.URL { return []*url.URL{must[*url.URL](t)(url.Parse(s))} }
	name := pki.AgentName(id)
	for label, c := range map[string]*x509.Certificate{
		"no name":         {},
		"two names":       {DNSNames: []string{name, pki.ControllerName(id)}},
		"upper case":      {DNSNames: []string{strings.ToUpper(name)}},
		"unknown role":    {DNSNames: []string{id.String() + ".admin.headgate.internal"}},
		"other domain":    {DNSNames: []string{id.String() + ".agent.example.com"}},
		"URI of another":  {DNSNames: []string{name}, URIs: uri("spiffe://f/agent/" + uuid.New().String())},
		"URI other role":  {DNSNames: []string{name}, URIs: uri("spiffe://f/controller/" + id.String())},
		"URI other form":  {DNSNames: []string{name}, URIs: uri("spiffe://f/agent/" + id.String() + "?x")},
		"URI scheme":      {DNSNames: []string{name}, URIs: uri("https://f/agent/" + id.String())},
		"URI fleet empty": {DNSNames: []string{name}, URIs: uri("spiffe:///agent/" + id.String())},
		"two URIs":        {DNSNames: []string{name}, URIs: append(uri("spiffe://f/agent/"+id.String()), uri("spiffe://g/agent/"+id.String())...)},
	} {
		if p, err := pki.PeerOf(c); err == nil {
			t.Errorf("%s: %+v", label, p)
		}
	}
}

func TestAuthorityComesBackWithItsKeyOnly(t *testing.T) {
	t.Parallel()
	dir, second := must[*pki.Dir](t)(pki.OpenDir(t.TempDir())), must[*pki.Dir](t)(pki.OpenDir(t.TempDir()))
	defer dir.Close()
	defer second.Close()
	ca := must[*pki.Authority](t)(pki.NewAuthority("fleet-a", time.Now()))
	if err := ca.SaveKey(dir); err != nil {
		t.Fatal(err)
	}
	again := must[*pki.Authority](t)(pki.LoadAuthority(dir, ca.PEM()))
	if again.ID() != ca.ID() || again.Fleet() != "fleet-a" || strings.Contains(string(ca.PEM()), "PRIVATE") {
		t.Fatalf("%s, %s", again.ID(), again.Fleet())
	}
	_, err := pki.LoadAuthority(second, ca.PEM())
	f, ok := errors.AsType[*fault.Error](err)
	if !ok || f.Code != "ca_key_missing" || !strings.Contains(f.Hint, ca.KeyFile()) || !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("got %v", err)
	}
	other := must[*pki.Authority](t)(pki.NewAuthority("fleet-a", time.Now()))
	if err := other.SaveKey(second); err != nil {
		t.Fatal(err)
	}
	if err := second.Write(ca.KeyFile(), must[[]byte](t)(second.ReadKey(other.KeyFile()))); err != nil {
		t.Fatal(err)
	}
	if _, err := pki.LoadAuthority(second, ca.PEM()); fault.CodeOf(err) != "ca_key_mismatch" {
		t.Fatalf("got %v", err)
	}
	if err := os.Chmod(filepath.Join(dir.Path(), ca.KeyFile()), 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := pki.LoadAuthority(dir, ca.PEM()); fault.CodeOf(err) != "key_file_exposed" {
		t.Fatalf("got %v", err)
	}
}

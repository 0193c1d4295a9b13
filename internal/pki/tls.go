package pki

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"uuid"

	"headgate/internal/fault"
)

// ALPN names. gRPC needs h2; the ports also speak HTTP/1.1.
const (
	protoH2   = "h2"
	protoHTTP = "http/1.1"
)

// base is what all configurations between programs share. Session tickets are
// off because a resumed session skips the verification of the certificate, so
// that a revoked or renewed one would live on.
func base(protos ...string) *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		NextProtos:             protos,
		SessionTicketsDisabled: true,
	}
}

// AgentServer is for an agent that belongs to a fleet: only controllers of
// that fleet get through the handshake.
func AgentServer(id *Identity, roots *Roots) *tls.Config {
	return perConnection(func() *tls.Config {
		c := base(protoH2)
		c.GetCertificate = id.forServer
		c.ClientAuth = tls.RequireAndVerifyClientCert // with Go's check of the usage clientAuth
		c.ClientCAs = roots.pool()
		c.VerifyConnection = func(s tls.ConnectionState) error {
			_, err := peerWithRole(s.PeerCertificates[0], RoleController)
			return err
		}
		return c
	})
}

// PairingServer is for an agent that belongs to no fleet and knows no
// authority yet: it takes any client certificate and verifies none. What comes
// over such a connection proves nothing until the pairing tags are checked.
func PairingServer(id *Identity) *tls.Config {
	c := base(protoH2)
	c.GetCertificate = id.forServer
	c.ClientAuth = tls.RequestClientCert
	return c
}

// ControllerPort serves a controller port. A client certificate is verified
// if one is given; who needs one, and in which role, is decided per route. The
// identity may be a stop-gap and the roots empty until the CA is known.
func ControllerPort(id *Identity, roots *Roots) *tls.Config {
	return perConnection(func() *tls.Config {
		c := base(protoH2, protoHTTP)
		c.GetCertificate = id.forServer
		c.ClientAuth = tls.VerifyClientCertIfGiven
		c.ClientCAs = roots.pool()
		return c
	})
}

// Switching is a server configuration that is chosen anew for each connection,
// for a listener whose rules change while it is open. pick must be safe for
// concurrent use and give one of the server configurations of this package.
func Switching(pick func() *tls.Config) *tls.Config {
	return perConnection(func() *tls.Config {
		c := pick()
		if c.GetConfigForClient == nil {
			return c
		}
		// crypto/tls does not ask a chosen configuration to choose again.
		inner, err := c.GetConfigForClient(nil)
		if err != nil || inner == nil {
			return c
		}
		return inner
	})
}

// perConnection defers to make for each handshake. The outer configuration
// carries a certificate callback only because tls.NewListener insists on one.
func perConnection(make func() *tls.Config) *tls.Config {
	c := base(protoH2, protoHTTP)
	c.GetCertificate = func(h *tls.ClientHelloInfo) (*tls.Certificate, error) { return make().GetCertificate(h) }
	c.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return make(), nil }
	return c
}

// DialPairing is for a controller that dials an agent it does not know yet. It
// presents the controller's certificate and verifies nothing of the agent but
// that it is one by its own word and has a P-256 key. Nothing secret may be
// sent before the pairing tags are checked.
func DialPairing(id *Identity) *tls.Config {
	c := base(protoH2)
	c.GetClientCertificate = id.forClient
	c.InsecureSkipVerify = true // the peer proves itself by the pairing tags instead
	c.VerifyConnection = func(s tls.ConnectionState) error {
		leaf := s.PeerCertificates[0]
		p, err := PeerOf(leaf)
		key, ok := leaf.PublicKey.(*ecdsa.PublicKey)
		if err != nil || p.Role != RoleAgent || !ok || key.Curve != elliptic.P256() {
			return notAnAgent(err)
		}
		return nil
	}
	return c
}

// DialController is for calls from one controller to another's controller
// port, itself included.
func DialController(id *Identity, roots *Roots, peer uuid.UUID) *tls.Config {
	c := base(protoH2, protoHTTP)
	c.GetClientCertificate = id.forClient
	c.RootCAs = roots.pool()
	c.ServerName = ControllerName(peer)
	return c
}

// Client is for programs that hold no certificate of their own, such as the
// command line, and trust the authorities of a CA file.
func Client(roots *Roots) *tls.Config {
	c := base(protoH2, protoHTTP)
	c.RootCAs = roots.pool()
	return c
}

// SelfClient is for a program's calls to its own port that is served with
// server: the peer must show the very certificate that the port serves now,
// whatever names and authorities are in it.
func SelfClient(server *tls.Config) *tls.Config {
	c := base(protoH2, protoHTTP)
	c.InsecureSkipVerify = true //nolint:gosec // the comparison below is stricter
	c.VerifyConnection = func(peer tls.ConnectionState) error {
		own, err := server.GetCertificate(nil)
		if err != nil {
			return err
		}
		if len(peer.PeerCertificates) == 0 || !bytes.Equal(peer.PeerCertificates[0].Raw, own.Certificate[0]) {
			return errors.New("the port shows another certificate than this program's")
		}
		return nil
	}
	return c
}

// AgentDial says which agent a controller wants to reach.
type AgentDial struct {
	Identity *Identity // of the controller
	Roots    *Roots
	ID       uuid.UUID
	// Pins are the keys that the agent may have: the current one and, while
	// its certificate is being renewed, the next one.
	Pins []Fingerprint
}

// DialAgent is for a controller that dials an enrolled agent. The standard
// verification stays on and the key is checked on top of it. The roots are
// taken when DialAgent is called; make a new configuration after they change.
// AgentDial.Explain turns what the handshake returns into a clear fault.
func DialAgent(d AgentDial) *tls.Config {
	c := base(protoH2)
	c.GetClientCertificate = d.Identity.forClient
	c.RootCAs = d.Roots.pool()
	c.ServerName = AgentName(d.ID)
	c.VerifyConnection = func(s tls.ConnectionState) error {
		if _, err := peerWithRole(s.PeerCertificates[0], RoleAgent); err != nil {
			return notAnAgent(err)
		}
		return d.checkPin(s.PeerCertificates[0])
	}
	return c
}

// CheckControllerChain is the agent's check in pairing by token: the chain
// that the dialler presented must lead to the one authority whose key the
// token names, for a controller, now. It returns who the dialler is, and the
// authority, which the agent must find again in the bundle it is given.
func CheckControllerChain(chain []*x509.Certificate, ca Fingerprint) (Peer, *x509.Certificate, error) {
	var root *x509.Certificate
	for _, c := range chain {
		if SPKI(c) == ca && c.IsCA {
			root = c
		}
	}
	var peer Peer
	err := errors.New("the authority named by the token is not in the chain")
	if root != nil {
		_, err = chain[0].Verify(x509.VerifyOptions{
			Roots:     NewRoots(root).pool(),
			KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		})
	}
	if err == nil {
		peer, err = peerWithRole(chain[0], RoleController)
	}
	if err != nil {
		return Peer{}, nil, fault.Wrap(err, fault.Forbidden, "pairing_foreign_controller",
			"The program that dialled does not belong to the fleet that the token was made for.").
			WithHint("Use a token of that fleet, check the clocks of both machines, or find out who else dials this agent.")
	}
	return peer, root, nil
}

package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// What `make chaos` demands of the listener. They are promises to users, so a
// run that breaks one of them fails.
const (
	// herdClients is a fleet of dashboards and scripts that all lose their
	// controller at one moment.
	herdClients = 2000
	herdBack    = 30 * time.Second
	// probeLimit is for the controller port during all of it, p99.
	probeLimit = 100 * time.Millisecond
	// refuseLimit is what refusing a herd may cost, in parts of a core.
	refuseLimit = 0.10
	// floodCostLimit is what a flood may cost, with the handshakes that strangers are
	// owed until they show what they are.
	floodCostLimit = 0.50
	// othersLimit is for honest clients during a flood, p95.
	othersLimit = 100 * time.Millisecond
	// floodRate and floodSources describe the flood.
	floodRate    = 1500
	floodSources = 1000
	floodTime    = 30 * time.Second
)

// chaosRun is a trial with promises to keep.
type chaosRun struct {
	name  string
	run   func(context.Context, *bench) error
	named bool // only when it is asked for by its name
}

func chaosTable() []chaosRun {
	return []chaosRun{
		{name: "herd", run: func(ctx context.Context, b *bench) error { return chaosHerd(ctx, b, true) }},
		{name: "stubborn-herd", run: func(ctx context.Context, b *bench) error { return chaosHerd(ctx, b, false) }},
		{name: "closed", run: chaosClosed},
		{name: "flood", run: chaosFlood},
		{name: "liars", run: chaosLiars},
		{name: "database-away", run: chaosAway},
		{name: "points", run: chaosPoints},
		{name: "campaign", run: chaosCampaign},
		{name: "soak", run: chaosSoak, named: true},
		{name: "quick-points", run: quickPoints, named: true},
		{name: "quick-campaign", run: quickCampaign, named: true},
	}
}

// runChaos runs the named trials, all without a name.
func (b *bench) runChaos(ctx context.Context, names string) error {
	var errs []error
	for _, c := range chaosTable() {
		if !slices.Contains(strings.Split(names, ","), c.name) && (names != "all" || c.named) {
			continue
		}
		b.note("chaos: %s", c.name)
		if err := c.run(ctx, b); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", c.name, err))
		}
	}
	return errors.Join(errs...)
}

// hold prints a figure beside its limit and gives an error when it is broken.
func (b *bench) hold(name string, value, limit float64, unit string) error {
	if value <= limit {
		b.line(fmt.Sprintf("CHAOS %s %s %s (limit %s) kept", name, decimal(value), unit, decimal(limit)))
		return nil
	}
	b.line(fmt.Sprintf("CHAOS %s %s %s (limit %s) BROKEN", name, decimal(value), unit, decimal(limit)))
	return fmt.Errorf("%s is %s %s, more than %s", name, decimal(value), unit, decimal(limit))
}

// secureRig is a rig whose public port has TLS and keeps its number.
func (b *bench) secureRig(ctx context.Context) (*rig, error) {
	dir, err := b.newDir()
	if err != nil {
		return nil, err
	}
	r := &rig{bench: b, dir: dir}
	if err := r.makeSecure(ctx); err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

func (r *rig) makeSecure(ctx context.Context) error {
	if err := r.securePort(ctx); err != nil {
		return err
	}
	r.extra = append(r.extra, "--agents", "1")
	return r.startUp(ctx)
}

// securePort chooses a public port and makes its certificate.
func (r *rig) securePort(ctx context.Context) error {
	port, err := freePort(ctx)
	if err != nil {
		return err
	}
	cert, key := filepath.Join(r.dir, "public.crt"), filepath.Join(r.dir, "public.key")
	if err := writeCertificate(cert, key); err != nil {
		return err
	}
	r.public = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	r.extra = []string{"--tls-cert-file", cert, "--tls-key-file", key}
	return nil
}

// writeCertificate makes a certificate for 127.0.0.1 that is its own authority.
func writeCertificate(certFile, keyFile string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "chaos"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644), //nolint:gosec // a certificate is public
		os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), 0o600),
	)
}

// publicTarget and controllerTarget say how clients reach the two ports.
func (r *rig) publicTarget() target {
	t := target{Host: r.public, CA: filepath.Join(r.dir, "public.crt"), Token: r.api.token}
	if r.public == "" { // the port of a plain rig
		t.CA = ""
		t.Host, _ = r.api.host()
	}
	return t
}

func (r *rig) controllerTarget() (target, error) {
	u, err := url.Parse(r.run.ControllerURL)
	if err != nil {
		return target{}, err
	}
	return target{Host: u.Host, CA: r.run.CAFile, Token: r.api.token}, nil
}

// killUp ends the controller as a crash would.
func (r *rig) killUp() {
	_ = r.up.cmd.Process.Kill() // it may have ended meanwhile
	<-r.up.ended
	r.up = nil
	_ = os.Remove(filepath.Join(r.dir, "headgate", "run.json")) // so that the next one is waited for
}

// chaosHerd lets a herd lose its controller, and watches it come back.
// Acceptance 58 and 59.
func chaosHerd(ctx context.Context, b *bench, backoff bool) (err error) {
	r, err := b.secureRig(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	var s herdState
	w, err := startWorker(&s, nil, "-herd")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.stop()) }()
	if err := w.order(herdOrder{Target: r.publicTarget(), Clients: herdClients, Backoff: backoff}, &s); err != nil {
		return err
	}
	if err := w.allBack(ctx, &s); err != nil {
		return err
	}
	b.note("%d clients came in within %s at first", s.Clients, s.LastIn.Round(time.Millisecond))
	return r.herdRestart(ctx, w)
}

// allBack waits until every client has had an answer since the mark.
func (w *worker) allBack(ctx context.Context, s *herdState) error {
	err := waitUntil(ctx, 4*herdBack, "the herd to be back", func() (bool, error) {
		err := w.order(herdOrder{}, s)
		return s.Back == s.Clients, err
	})
	if err != nil {
		return fmt.Errorf("%w (%d of %d are; %d tries, %d failed, %d of them at the dial, %d told to wait; one says: %s)",
			err, s.Back, s.Clients, s.Tries, s.Failed, s.Refused, s.Busy, s.Example)
	}
	return nil
}

// herdRestart kills the controller and starts it again, on the same ports.
func (r *rig) herdRestart(ctx context.Context, w *worker) (err error) {
	controller, err := r.controllerTarget()
	if err != nil {
		return err
	}
	r.controller = controller.Host
	r.killUp()
	var s herdState
	if err := w.order(herdOrder{Mark: true}, &s); err != nil {
		return err
	}
	var seen probeState
	p, err := startWorker(&seen, nil, "-prober")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	if err := p.order(probeOrder{Target: controller, Path: "/livez", From: "127.0.0.1", Every: 20 * time.Millisecond, Patient: true}, &seen); err != nil {
		return err
	}
	if err := r.startUp(ctx); err != nil { // returns when the public port is open
		return err
	}
	var opened herdState
	if err := w.order(herdOrder{}, &opened); err != nil {
		return err
	}
	if err := w.allBack(ctx, &s); err != nil {
		return err
	}
	if err := p.order(probeOrder{Stop: true}, &seen); err != nil {
		return err
	}
	r.bench.note("until the public port opened %d tries, %d failed; in all %d tries, %d failed (%d at the dial), %d told to wait",
		opened.Tries, opened.Failed, s.Tries, s.Failed, s.Refused, s.Busy)
	r.bench.note("controller port: %d probes, %d failed %v, p50 %s ms", len(seen.Times), seen.Failed, seen.Errors, decimal(quantile(seen.Times, 0.5)))
	return errors.Join(
		r.bench.hold("herd_back_s", s.LastIn.Seconds(), herdBack.Seconds(), "s"),
		r.bench.hold("herd_controller_port_p99_ms", quantile(seen.Times, 0.99), float64(probeLimit.Milliseconds()), "ms"),
		r.bench.hold("herd_controller_port_failures", float64(seen.Failed), 0, "probes"),
	)
}

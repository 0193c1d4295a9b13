package pki

import (
	"crypto/tls"
	"log/slog"
	"os"
	"sync"
	"time"

	"headgate/internal/fault"
)

// publicCheckEvery is how often the files of the public certificate are
// looked at: soon enough after a renewal, and no work worth speaking of.
const publicCheckEvery = 10 * time.Second

// PublicPort serves the public port with the operator's own certificate, for
// browsers and other clients outside the fleet. Replaced files are noticed
// while it runs; a replacement that cannot be used is logged once and the old
// certificate stays. A nil logger discards.
func PublicPort(certFile, keyFile string, logger *slog.Logger) (*tls.Config, error) {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	p := &publicCertificate{certFile: certFile, keyFile: keyFile, logger: logger}
	if err := p.load(); err != nil {
		return nil, fault.Wrap(err, fault.Invalid, "public_certificate_unusable",
			"The certificate "+certFile+" with the key "+keyFile+" cannot be used for the public port.").
			WithHint("Both must be PEM files that belong together, the leaf first, readable by this user.")
	}
	p.checked = time.Now()
	c := base(protoH2, protoHTTP)
	c.MinVersion = tls.VersionTLS12 // clients outside the fleet may be older
	c.GetCertificate = p.certificate
	return c, nil
}

type publicCertificate struct {
	certFile, keyFile string
	logger            *slog.Logger

	mu       sync.Mutex // guards all below
	cert     *tls.Certificate
	modified [2]time.Time // of the two files, when they were last tried
	checked  time.Time
}

func (p *publicCertificate) certificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if now := time.Now(); now.Sub(p.checked) >= publicCheckEvery {
		p.checked = now
		if p.modified != p.stat() {
			if err := p.load(); err != nil {
				p.logger.Error("keep the old public certificate", "err", err)
			}
		}
	}
	return p.cert, nil
}

// load tries the files and notes which state of them it tried, so that a bad
// pair is tried again only after it has changed.
func (p *publicCertificate) load() error {
	p.modified = p.stat()
	cert, err := tls.LoadX509KeyPair(p.certFile, p.keyFile)
	if err == nil {
		p.cert = &cert
	}
	return err
}

func (p *publicCertificate) stat() (times [2]time.Time) {
	for i, name := range []string{p.certFile, p.keyFile} {
		if info, err := os.Stat(name); err == nil {
			times[i] = info.ModTime()
		}
	}
	return times
}

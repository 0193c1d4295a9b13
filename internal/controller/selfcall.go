package controller

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"time"

	"headgate/internal/pki"
)

// selfCallTimeout bounds one call; a healthy one takes a millisecond.
const selfCallTimeout = 3 * time.Second

// selfCall reaches the controller over its own controller port as a peer
// would: real address, a connection and a TLS handshake of its own, checked
// against the fleet's CA. Only while that works is the public port open. It
// asks /livez and not /readyz, which tells what the gate itself has found.
func (c *Controller) selfCall(ctx context.Context) error { return c.callLivez(ctx, c.state.roots) }

// selfTLS gives how a call to ourselves knows that it is us who answer: by the
// fleet's CA or, without a controller port, by the certificate that the public
// port serves.
func (c *Controller) selfTLS(roots *pki.Roots) *tls.Config {
	if c.cfg.TwoPhase {
		return pki.Client(roots)
	}
	if c.public == nil {
		return nil
	}
	return pki.SelfClient(c.public)
}

// callLivez asks the controller port for /livez, trusting roots.
func (c *Controller) callLivez(ctx context.Context, roots *pki.Roots) error {
	ctx, cancel := context.WithTimeout(ctx, selfCallTimeout)
	defer cancel()
	transport := &http.Transport{TLSClientConfig: c.selfTLS(roots), ForceAttemptHTTP2: true, DisableKeepAlives: true}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.Endpoints().ControllerURL+"/livez", nil)
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return fmt.Errorf("call myself: %w", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	if err != nil {
		return fmt.Errorf("read my own answer: %w", err)
	}
	if resp.StatusCode == http.StatusTooManyRequests && !c.cfg.TwoPhase {
		return nil // the one port is over its soft cap, and says so as it should
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("my own /livez answered %d: %s", resp.StatusCode, body)
	}
	return nil
}

package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"
	"uuid"

	"google.golang.org/grpc/credentials"

	"headgate/internal/agent/ledger"
	"headgate/internal/agent/policy"
	"headgate/internal/agentpb"
	"headgate/internal/fault"
	"headgate/internal/pki"
)

// Run is the agent. It returns nil after ctx is done and all is stopped, or an
// error that says why the agent cannot go on.
func Run(ctx context.Context, c Config) (err error) {
	c = c.withDefaults()
	state, err := openState(c.DataDir, time.Now())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, state.close()) }()
	allowed := policy.None()
	if c.PolicyFile != "" {
		if allowed, err = policy.Load(c.PolicyFile); err != nil {
			return err
		}
	}
	epochs, err := loadEpochs(state)
	if err != nil {
		return err
	}
	book, err := ledger.Open(filepath.Join(state.dir.Path(), ledgerFile), c.Limits.Ledger)
	if err != nil {
		return err
	}
	if n := book.CutBytes(); n > 0 {
		c.Logger.Warn("cut a torn record off the end of the ledger; the last stop was a crash", "bytes", n)
	}
	keeper := newKeeper(c, state)
	left, err := recoverLeftovers(keeper, c.Logger)
	if err != nil {
		return errors.Join(fault.Wrap(err, fault.Internal, "leftovers_unknown", "What an earlier start of this agent has left running cannot be looked for."), book.Close())
	}
	a := &runner{config: c, state: state, epochs: epochs, instance: uuid.NewV4()}
	executors := newExecutors(c, allowed, keeper)
	if a.slot, err = newSlot(c, book, epochs, executors, left); err != nil {
		return errors.Join(err, book.Close())
	}
	a.offers = executors.offers()
	defer func() { err = errors.Join(err, a.slot.close()) }()
	return a.listen(ctx)
}

// runner is one run of the agent.
type runner struct {
	config   Config
	state    *state
	epochs   *epochs
	slot     *slot
	offers   []*agentpb.KindInfo
	instance uuid.UUID
	address  string
}

func (a *runner) listen(ctx context.Context) (err error) {
	if err := a.state.dir.Remove(infoFile); err != nil {
		return err
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", a.config.Listen)
	if err != nil {
		return fault.Wrap(err, fault.Unavailable, "listen_failed", "The agent cannot listen on "+a.config.Listen+".").
			WithHint("Choose another address with --listen, or stop the program that uses this one.")
	}
	tcp, ok := ln.(*net.TCPListener)
	if !ok {
		return errors.Join(fmt.Errorf("listening on %s gave no TCP port", a.config.Listen), ln.Close())
	}
	defer func() { _ = tcp.Close() }() // what was accepted is closed by now
	a.address = tcp.Addr().String()
	if !a.state.paired {
		if err := a.pair(ctx, port{tcp}); err != nil || ctx.Err() != nil {
			return errors.Join(err, a.state.dir.Remove(infoFile))
		}
	}
	err = a.serve(ctx, port{tcp})
	return errors.Join(err, a.state.dir.Remove(infoFile))
}

// ready tells where the agent listens.
func (a *runner) ready() error {
	err := a.state.saveJSON(infoFile, info{
		ID: a.state.id.String(), Instance: a.instance.String(), Name: a.config.Name, Address: a.address,
		Version: a.config.Version, PID: os.Getpid(), Paired: a.state.paired,
	})
	a.config.Logger.Info("listening", "address", a.address, "agent", a.state.id, "paired", a.state.paired)
	return err
}

// pair serves pairing until the agent belongs to a fleet, the window closes, or
// ctx is done.
func (a *runner) pair(ctx context.Context, on port) error {
	p, err := openPairing(a.config, a.state, a.epochs)
	if err != nil {
		return err
	}
	defer p.token.Zero()
	phase, err := on.newPhase(pairingConns, a.config.Logger)
	if err != nil {
		return err
	}
	p.port = phase
	server := newServer(credentials.NewTLS(pki.PairingServer(a.state.identity)), pairingMessage)
	agentpb.RegisterPairingServer(server, p)
	if err := a.announce(); err != nil {
		return err
	}
	fingerprint := a.state.identity.SPKI()
	a.config.Logger.Info("waiting to be paired", "token_id", p.token.ID(), "window", a.config.Limits.PairingWindow, "key", fmt.Sprintf("%x", fingerprint))
	window := time.AfterFunc(a.config.Limits.PairingWindow, func() {
		p.close(fault.New(fault.Deadline, "pairing_window_closed", "Nobody has paired this agent while its window was open.").
			WithHint("Start the agent again, then pair it from a controller within ten minutes."))
	})
	defer window.Stop()
	err = serve(ctx, server, phase, p.finished, func() {})
	p.readers.Wait()
	if err == nil && a.state.paired {
		return a.state.dir.Remove(pairingFile)
	}
	return err
}

// announce makes the address known, to whoever waits for it.
func (a *runner) announce() error {
	if err := a.ready(); err != nil {
		return err
	}
	if a.config.OnListen != nil {
		addr, err := net.ResolveTCPAddr("tcp", a.address)
		if err != nil {
			return err
		}
		a.config.OnListen(addr)
		a.config.OnListen = nil // once, though pairing and serving both come here
	}
	return nil
}

// serve executes tasks until ctx is done.
func (a *runner) serve(ctx context.Context, on port) error {
	phase, err := on.newPhase(maxStrangers, a.config.Logger)
	if err != nil {
		return err
	}
	s := &service{
		config: a.config, log: a.config.Logger, state: a.state, slot: a.slot, instance: a.instance,
		offers: a.offers, hostname: hostname(), os: osName(),
	}
	server := newServer(proving{credentials.NewTLS(pki.AgentServer(a.state.identity, a.state.roots))}, maxMessage)
	agentpb.RegisterAgentServer(server, s)
	if err := a.announce(); err != nil {
		return err
	}
	err = serve(ctx, server, phase, nil, func() {
		a.slot.stop()
		a.slot.endSessions()
	})
	s.readers.Wait()
	return err
}

// endSessions gives a Final that was just handed over the time to leave.
func (s *slot) endSessions() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.session != nil {
		s.session.finish(errStoppingStatus())
	}
}

// close waits for executors that are about to end and closes the ledger.
func (s *slot) close() error {
	s.end(errStopping)
	done := make(chan struct{})
	go func() {
		s.work.Wait()
		close(done)
	}()
	timer := time.NewTimer(flushWait)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		s.log.Warn("a task does not end; its program is killed with the agent")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ledger.Close()
}

package fleet

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"headgate/internal/agentpb"
	"headgate/internal/fault"
	"headgate/internal/pki"
)

const (
	// settleEvery is how often agents whose last word got lost are dialled.
	settleEvery = 15 * time.Second
	// settleTries are made at once when the last word got lost, for an agent
	// that is just changing from pairing to normal service.
	settleTries = 3
	settlePause = 300 * time.Millisecond
	settleWait  = 4 * time.Second // for one try
)

// insertEnrolling stores the agent. A row that an earlier run left behind is
// replaced: the agent is in pairing mode and has just proved itself, so it does
// not hold the certificate of that run.
func (f *Fleet) insertEnrolling(ctx context.Context, a Agent) (Agent, error) {
	row, err := f.cfg.Store.InsertAgent(ctx, a)
	if err == nil || !fault.Is(err, fault.Conflict) {
		return row, err
	}
	rows, lerr := f.cfg.Store.Agents(ctx)
	if lerr != nil {
		return Agent{}, lerr
	}
	for _, old := range rows {
		if old.ID == a.ID && old.SPKI == a.SPKI && old.Status == Enrolling {
			if _, rerr := f.cfg.Store.SetStatus(ctx, old.ID, Removed, "an earlier pairing did not finish", a.PairedBy); rerr != nil {
				return Agent{}, rerr
			}
			return f.cfg.Store.InsertAgent(ctx, a)
		}
	}
	return Agent{}, err
}

// confirm makes an enrolling agent a member of the fleet.
func (f *Fleet) confirm(ctx context.Context, row Agent) (View, error) {
	row, err := f.cfg.Store.ConfirmAgent(ctx, row.ID)
	if err != nil {
		return View{}, err
	}
	m, fresh := f.join(row)
	f.apply(m, row, fresh, EventPaired)
	return m.view(time.Now()), nil
}

// settleNow finds out by one mutual TLS dial whether the agent has what was
// handed over.
func (f *Fleet) settleNow(ctx context.Context, row Agent) (View, error) {
	for range settleTries {
		if f.answers(ctx, row) {
			return f.confirm(ctx, row)
		}
		pause(ctx, settlePause)
	}
	return View{}, fault.Newf(fault.Unavailable, CodePairingPending,
		"The agent proved itself, but the connection ended before it said that it has its certificate.").
		WithHint("If it has, it appears in the list by itself within a minute; otherwise pair it again.")
}

// answers says whether an agent serves with the key and the certificate that
// it is enrolled with.
func (f *Fleet) answers(ctx context.Context, row Agent) bool {
	ctx, cancel := context.WithTimeout(ctx, settleWait)
	defer cancel()
	for _, address := range row.Addresses {
		cc, _, err := f.dialer.client(address, pki.DialAgent(pki.AgentDial{
			Identity: f.identity, Roots: f.roots, ID: row.ID, Pins: []pki.Fingerprint{row.SPKI},
		}))
		if err != nil {
			continue
		}
		reply, err := agentpb.NewAgentClient(cc).Ping(ctx, &agentpb.PingRequest{})
		_ = cc.Close() // it was our own; there is nobody to tell
		if err == nil && reply.GetAgentId() == row.ID.String() {
			return true
		}
		if code := status.Code(err); code != codes.Unavailable && code != codes.DeadlineExceeded {
			f.log.Info("an enrolling agent answers, but not as expected", "agent", row.ID, "err", err)
		}
	}
	return false
}

// settleEnrolling looks after agents that stayed enrolling because a program
// stopped at the wrong moment: those that have their certificate become
// active, the others are swept after EnrolKeep.
func (f *Fleet) settleEnrolling(ctx context.Context) {
	tick := time.NewTicker(settleEvery)
	defer tick.Stop()
	for {
		f.mu.Lock()
		rows := f.enrolling
		f.enrolling = nil
		f.mu.Unlock()
		for _, row := range rows {
			if time.Since(row.PairedAt) < f.cfg.Limits.PairTimeout {
				continue // its pairing may still be running
			}
			if f.answers(ctx, row) {
				if _, err := f.confirm(ctx, row); err != nil {
					f.log.Warn("cannot confirm an agent", "agent", row.ID, "err", err)
				}
			}
		}
		if len(rows) > 0 {
			if err := f.cfg.Store.DropEnrolling(ctx, time.Now().Add(-EnrolKeep)); err != nil && ctx.Err() == nil {
				f.log.Warn("cannot sweep agents that were never confirmed", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

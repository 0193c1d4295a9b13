package fleet

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
	"uuid"

	"headgate/internal/agentpb"
	"headgate/internal/fault"
	"headgate/tasks"
)

const (
	maxLabels      = 64
	maxLabelKey    = 63
	maxLabelValue  = 255
	maxNamePeople  = 128 // bytes of a name given by people
	pingNonceBytes = 16
	// defaultPingWait is how long a ping waits when its context says nothing.
	defaultPingWait = 5 * time.Second
)

// Update applies an operator's change.
func (f *Fleet) Update(ctx context.Context, id uuid.UUID, c Change, actor string) (View, error) {
	m, err := f.find(id)
	if err != nil {
		return View{}, err
	}
	if err := c.check(); err != nil {
		return View{}, err
	}
	m.op.Lock()
	defer m.op.Unlock()
	row, err := f.cfg.Store.ChangeAgent(ctx, id, c, actor)
	if err != nil {
		return View{}, err
	}
	f.take(m, row, EventChanged)
	return m.view(time.Now()), nil
}

// check validates a change and brings addresses into their one form.
func (c *Change) check() error {
	if c.Name != nil {
		if err := checkName(*c.Name); err != nil {
			return err
		}
	}
	if c.Addresses != nil {
		if len(*c.Addresses) == 0 || len(*c.Addresses) > MaxAddresses {
			return invalidChange("/addresses", fmt.Sprintf("An agent has 1 to %d addresses.", MaxAddresses))
		}
		parsed := make([]string, 0, len(*c.Addresses))
		for _, text := range *c.Addresses {
			address, err := ParseAddress(text)
			if err != nil {
				return err
			}
			if !slices.Contains(parsed, address) {
				parsed = append(parsed, address)
			}
		}
		c.Addresses = &parsed
	}
	if c.Labels != nil {
		return checkLabels(*c.Labels)
	}
	return nil
}

func checkName(name string) error {
	if name == "" || len(name) > maxNamePeople || !utf8.ValidString(name) || strings.TrimSpace(name) != name ||
		strings.ContainsFunc(name, unicode.IsControl) {
		return invalidChange("/name", fmt.Sprintf("A name has 1 to %d bytes, no control characters and no space at its ends.", maxNamePeople))
	}
	if _, err := uuid.Parse(name); err == nil {
		return invalidChange("/name", "A name must not look like an id.")
	}
	return nil
}

func checkLabels(labels map[string]string) error {
	if len(labels) > maxLabels {
		return invalidChange("/labels", fmt.Sprintf("An agent has at most %d labels.", maxLabels))
	}
	for key, value := range labels {
		if key == "" || len(key) > maxLabelKey || strings.Trim(key, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._/-") != "" {
			return invalidChange("/labels", fmt.Sprintf("A label's key has 1 to %d letters, digits and . _ / -", maxLabelKey))
		}
		if len(value) > maxLabelValue || !utf8.ValidString(value) || strings.ContainsFunc(value, unicode.IsControl) {
			return invalidChange("/labels", fmt.Sprintf("The value of label %q is longer than %d bytes or has control characters.", key, maxLabelValue))
		}
	}
	return nil
}

func invalidChange(pointer, detail string) error {
	return fault.New(fault.Invalid, CodeInvalidChange, detail).WithField(pointer, detail)
}

// Remove ends the agent's membership. Its row stays for the history of its
// tasks; its connection ends at once, and it can connect to nobody by itself.
func (f *Fleet) Remove(ctx context.Context, id uuid.UUID, actor string) error {
	m, err := f.find(id)
	if err != nil {
		return err
	}
	m.op.Lock()
	defer m.op.Unlock()
	row, err := f.cfg.Store.SetStatus(ctx, id, Removed, "removed by "+actor, actor)
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.row.StatusWhy, m.row.Revision = row.StatusWhy, row.Revision
	m.mu.Unlock()
	f.forget(m)
	return nil
}

// Approve ends an agent's quarantine: an operator says that it may go on, and
// that the ledger named in the reason is its ledger. That ledger is not
// recorded here: the next session still says LedgerNew, on whichever
// controller, until the queue has settled what was under way with the old one.
func (f *Fleet) Approve(ctx context.Context, id uuid.UUID, actor string) (View, error) {
	m, err := f.find(id)
	if err != nil {
		return View{}, err
	}
	m.op.Lock()
	defer m.op.Unlock()
	m.mu.Lock()
	row := m.row
	m.mu.Unlock()
	if row.Status != Quarantined {
		return View{}, fault.New(fault.Conflict, CodeNotQuarantined, "The agent is not quarantined.")
	}
	why := ""
	if ledger := ledgerNamed(row.StatusWhy); ledger != uuid.Nil() {
		why = withLedger("approved by an operator", ledger)
	}
	row, err = f.cfg.Store.SetStatus(ctx, id, Active, why, actor)
	if err != nil {
		return View{}, err
	}
	m.mu.Lock()
	m.pending, m.instances = "", [2]instanceAt{}
	m.mu.Unlock()
	f.take(m, row, EventChanged)
	return m.view(time.Now()), nil
}

// store writes what sessions and the queue have asked for.
func (f *Fleet) store(ctx context.Context) {
	f.mu.Lock()
	todo := f.dirty
	f.dirty = map[*member]struct{}{}
	f.mu.Unlock()
	for m := range todo {
		if err := f.storeOne(ctx, m); err != nil && ctx.Err() == nil {
			f.log.Warn("cannot store what became of an agent; will try again", "agent", m.id, "err", err)
			f.mu.Lock()
			f.dirty[m] = struct{}{} // with the next periodic pass
			f.mu.Unlock()
		}
	}
}

func (f *Fleet) storeOne(ctx context.Context, m *member) error {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	m.op.Lock()
	defer m.op.Unlock()
	m.mu.Lock()
	why, row := m.pending, m.row
	ledger, settled, lease := m.ledger, m.settled, m.lease
	m.mu.Unlock()
	if why != "" {
		stored, err := f.cfg.Store.SetStatus(ctx, m.id, Quarantined, why, "headgate")
		if err != nil {
			return err
		}
		m.mu.Lock()
		m.pending = ""
		m.mu.Unlock()
		f.log.Warn("agent quarantined", "agent", m.id, "why", why)
		f.take(m, stored, EventChanged)
		return nil
	}
	if !settled || row.Status != Active || ledger == row.LedgerID {
		return nil
	}
	if err := f.cfg.Store.SetSeen(ctx, m.num, lease, ledger, row.Version, row.Hostname, row.OS); err != nil {
		return err
	}
	m.mu.Lock()
	m.row.LedgerID = ledger
	m.mu.Unlock()
	f.tasks.AgentChanged(m.agent())
	return nil
}

// SetFacts keeps the result of core.inventory with its agent, unless it has
// newer facts.
func (f *Fleet) SetFacts(ctx context.Context, num tasks.AgentNum, facts json.RawMessage, at time.Time) error {
	m := f.reg.num(num)
	if m == nil {
		return nil // removed meanwhile
	}
	m.op.Lock()
	defer m.op.Unlock()
	m.mu.Lock()
	newer := !m.row.FactsAt.Before(at)
	m.mu.Unlock()
	if newer {
		return nil
	}
	if err := f.cfg.Store.SetFacts(ctx, num, facts, at); err != nil {
		return err
	}
	m.mu.Lock()
	m.row.Facts, m.row.FactsAt = facts, at
	m.mu.Unlock()
	f.cfg.Publish(Event{What: EventChanged, View: m.view(time.Now())})
	return nil
}

// Pong is an agent's answer to a ping.
type Pong struct {
	RTT     time.Duration `json:"rtt_ns"`
	Version string        `json:"version"`
	Clock   time.Time     `json:"clock"`             // the agent's
	Running *tasks.Ref    `json:"running,omitempty"` // nil = its slot is free
}

// Ping makes a round trip to the agent outside its slot, through the controller
// that is connected to it.
func (f *Fleet) Ping(ctx context.Context, id uuid.UUID) (Pong, error) {
	p, err := f.PingHere(ctx, id)
	if fault.CodeOf(err) != CodeAgentElsewhere || f.cfg.PingElsewhere == nil {
		return p, err
	}
	m, err := f.find(id)
	if err != nil {
		return Pong{}, err
	}
	return f.cfg.PingElsewhere(ctx, m.agent())
}

// PingHere is Ping for agents that this controller is connected to.
func (f *Fleet) PingHere(ctx context.Context, id uuid.UUID) (Pong, error) {
	m, err := f.find(id)
	if err != nil {
		return Pong{}, err
	}
	s := m.session.Load()
	if s == nil {
		return Pong{}, offline(m.view(time.Now()))
	}
	ctx, cancel := context.WithTimeout(ctx, defaultPingWait)
	defer cancel()
	nonce := make([]byte, pingNonceBytes)
	_, _ = rand.Read(nonce) // documented never to fail
	began := time.Now()
	reply, err := agentpb.NewAgentClient(s.cc).Ping(ctx, &agentpb.PingRequest{Nonce: nonce})
	if err != nil {
		return Pong{}, faultOf(err)
	}
	now := time.Now()
	rtt := now.Sub(began)
	if string(reply.GetNonce()) != string(nonce) || reply.GetAgentId() != id.String() {
		return Pong{}, fault.New(fault.Unavailable, CodeAgentAnswer, "The agent's answer does not belong to the question.").
			WithHint("Check what runs at the agent's address.")
	}
	s.sawRTT(rtt)
	s.sawClock(reply.GetClockUnixNano(), now, rtt)
	return Pong{RTT: rtt, Version: clean(reply.GetVersion(), maxName), Clock: timeOf(reply.GetClockUnixNano()), Running: refOf(reply.GetRunning())}, nil
}

// offline says why an agent cannot be asked now.
func offline(v View) error {
	switch v.Live.Health {
	case HealthElsewhere:
		return fault.New(fault.Unavailable, CodeAgentElsewhere, "Another controller is connected to the agent.")
	case HealthQuarantined:
		return fault.Newf(fault.Conflict, "agent_quarantined", "The agent is quarantined: %s.", v.StatusWhy).
			WithHint("Approve or remove the agent.")
	}
	if v.Live.Sentence == "" {
		return fault.New(fault.Unavailable, CodeAgentOffline, "The agent is not connected yet.").WithHint("Try again in a few seconds.")
	}
	return fault.Newf(fault.Unavailable, CodeAgentOffline, "The agent cannot be reached: %s.", v.Live.Sentence).
		WithHint("Check that headgate-agent runs there and that its address is right.")
}

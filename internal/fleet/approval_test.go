package fleet_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"uuid"

	"headgate/internal/agentpb"
	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/internal/fleet/fleettest"
)

// judge quarantines as the queue does: whenever a ledger is new and nobody has
// approved it.
func (h *harness) judge() *harness {
	h.queue.On = func(c fleettest.Call) {
		if c.Method == "up" && c.Session.LedgerNew && !c.Session.LedgerApproved {
			h.Quarantine(c.Agent, "It came back with another ledger.")
		}
	}
	return h
}

func (h *harness) quarantined(id uuid.UUID) fleet.View {
	h.t.Helper()
	return h.event("quarantined", func(e fleet.Event) bool {
		return e.View.ID == id && e.View.Status == fleet.Quarantined && e.What == fleet.EventChanged
	}).View
}

func (h *harness) approve(id uuid.UUID) {
	h.t.Helper()
	if _, err := h.Approve(h.t.Context(), id, "user:a"); err != nil {
		h.t.Fatal(err)
	}
}

// session waits for the n-th one and says which ledger it must tell of.
func (h *harness) session(row fleet.Agent, n int, ledger uuid.UUID, isNew, approved bool) {
	h.t.Helper()
	s := h.up(row.Num, n).Session
	if s.LedgerID != ledger || s.LedgerNew != isNew || s.LedgerApproved != approved {
		h.t.Fatalf("session %d: ledger %s, new %t, approved %t; want %s, %t, %t", n, s.LedgerID, s.LedgerNew, s.LedgerApproved, ledger, isNew, approved)
	}
}

// recorded waits until the queue is told of a ledger on record.
func (h *harness) recorded(row fleet.Agent, ledger uuid.UUID) {
	h.t.Helper()
	h.queue.Wait(h.t, 1, "the recorded ledger", func(c fleettest.Call) bool {
		return c.Method == "changed" && c.Agent == row.Num && c.Changed.LedgerID == ledger
	})
	if stored := h.store.Row(row.Num); stored.LedgerID != ledger {
		h.t.Errorf("stored ledger %s", stored.LedgerID)
	}
}

// changeable is an agent whose ledger the test may replace while it runs. Its
// row has another ledger on record.
type changeable struct {
	*fleettest.Agent
	ledger atomic.Pointer[uuid.UUID]
}

func (h *harness) changeable() (*changeable, fleet.Agent) {
	h.t.Helper()
	c := &changeable{Agent: fleettest.NewAgent(h.t, h.authority, "a")}
	c.lose()
	c.Welcome = func(_ *agentpb.Hello, w *agentpb.Welcome) error {
		w.LedgerId = c.ledger.Load().String()
		return nil
	}
	row := c.Row(c.Start(h.t))
	row.LedgerID = uuid.NewV4()
	return c, h.store.Add(row)
}

func (c *changeable) lose() uuid.UUID {
	id := uuid.NewV4()
	c.ledger.Store(&id)
	return id
}

// TestAReplacedLedgerIsForTheQueueToJudge: the queue quarantines, an operator
// approves, the queue settles, and only then the new ledger is on record.
func TestAReplacedLedgerIsForTheQueueToJudge(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil).judge()
	a, row := h.changeable()
	ledger := *a.ledger.Load()
	h.run()
	h.session(row, 1, ledger, true, false)
	h.down(row.Num, 1)
	v := h.quarantined(row.ID)
	if want := "It came back with another ledger (ledger " + ledger.String() + ")"; v.Live.Health != fleet.HealthQuarantined || v.StatusWhy != want {
		t.Errorf("view %+v", v)
	}
	if stored := h.store.Row(row.Num); stored.LedgerID != row.LedgerID || stored.Status != fleet.Quarantined {
		t.Errorf("stored %+v", stored)
	}
	if _, err := h.Ping(t.Context(), row.ID); fault.CodeOf(err) != "agent_quarantined" {
		t.Errorf("ping: %v", err)
	}
	h.approve(row.ID)
	h.session(row, 2, ledger, true, true)
	if stored := h.store.Row(row.Num); stored.LedgerID != row.LedgerID || stored.Status != fleet.Active {
		t.Errorf("stored before anything was settled: %+v", stored)
	}
	if _, err := h.Approve(t.Context(), row.ID, "user:a"); fault.CodeOf(err) != fleet.CodeNotQuarantined {
		t.Errorf("approved twice: %v", err)
	}
	h.give(row.Num, 1, "1")
	h.recorded(row, ledger)
	h.Reconnect(row.Num, "test")
	h.session(row, 3, ledger, false, false)
}

// TestAnApprovalOutlivesItsController: the next one still sees that the ledger
// is new, trusts the approved one, and no other.
func TestAnApprovalOutlivesItsController(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil).judge()
	a, row := h.changeable()
	ledger := *a.ledger.Load()
	h.run()
	h.quarantined(row.ID)
	h.stop()

	// It was stopped in the quarantine; the next one never sees a session of
	// the agent before the operator decides.
	h = h.another().judge()
	h.run()
	h.approve(row.ID)
	h.session(row, 1, ledger, true, true)
	h.stop() // before anything was settled

	h = h.another().judge()
	h.run()
	h.session(row, 1, ledger, true, true)
	h.give(row.Num, 1, "1")
	h.recorded(row, ledger)
	h.stop()

	h = h.another().judge()
	h.run()
	h.session(row, 1, ledger, false, false)
}

// TestAnApprovalIsOfOneLedger: what replaces an approved ledger is not trusted.
func TestAnApprovalIsOfOneLedger(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil).judge()
	a, row := h.changeable()
	h.run()
	h.quarantined(row.ID)
	next := a.lose() // between the quarantine and the approval
	h.approve(row.ID)
	h.session(row, 2, next, true, false)
	h.event("quarantined again", func(e fleet.Event) bool {
		return e.What == fleet.EventChanged && e.View.Status == fleet.Quarantined && strings.Contains(e.View.StatusWhy, next.String())
	})
	h.stop()
	if stored := h.store.Row(row.Num); stored.LedgerID != row.LedgerID || stored.Status != fleet.Quarantined {
		t.Errorf("stored %+v", stored)
	}
}

// TestAnApprovalThatCannotBeStoredIsNone: memory stays as the row is.
func TestAnApprovalThatCannotBeStoredIsNone(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil).judge()
	var broken atomic.Bool
	h.store.Before = func(_ context.Context, method string) error {
		if broken.Load() && method == "SetStatus" {
			return errors.New("the database is away")
		}
		return nil
	}
	_, row := h.changeable()
	h.run()
	h.quarantined(row.ID)
	broken.Store(true)
	if _, err := h.Approve(t.Context(), row.ID, "user:a"); err == nil {
		t.Fatal("approved without a database")
	}
	if v, err := h.Get(row.ID); err != nil || v.Status != fleet.Quarantined {
		t.Errorf("memory says %s, %v", v.Status, err)
	}
	broken.Store(false)
	h.approve(row.ID)
	h.session(row, 2, h.up(row.Num, 1).Session.LedgerID, true, true)
}

// TestALedgerIsRecordedOnceTheQueueGoesOn: without quarantine, giving work is
// the queue's word that nothing of the old ledger is open.
func TestALedgerIsRecordedOnceTheQueueGoesOn(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	a, row := h.changeable()
	h.run()
	h.up(row.Num, 1)
	if stored := h.store.Row(row.Num); stored.LedgerID != row.LedgerID {
		t.Error("recorded too early")
	}
	h.give(row.Num, 1, "1")
	h.recorded(row, *a.ledger.Load())
}

// TestASettledLedgerIsTrustedBeforeItIsStored: what was given since is known
// to it, and a lost connection must not make that unknown. Under another lease
// only what is stored counts.
func TestASettledLedgerIsTrustedBeforeItIsStored(t *testing.T) {
	t.Parallel()
	for name, sameLease := range map[string]bool{"same lease": true, "another lease": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, quick(), nil)
			var broken atomic.Bool
			refused := make(chan struct{}, 100)
			h.store.Before = func(_ context.Context, method string) error {
				if broken.Load() && method == "SetSeen" {
					refused <- struct{}{}
					return errors.New("the database is away")
				}
				return nil
			}
			a, row := h.changeable()
			ledger := *a.ledger.Load()
			h.run()
			h.session(row, 1, ledger, true, false)
			broken.Store(true)
			h.give(row.Num, 1, "1")
			<-refused
			if !sameLease {
				h.own(2)
				h.session(row, 2, ledger, true, false)
				return
			}
			broken.Store(false)
			h.Reconnect(row.Num, "test")
			h.session(row, 2, ledger, false, false)
			if stored := h.store.Row(row.Num); stored.LedgerID != ledger {
				t.Errorf("stored ledger %s", stored.LedgerID)
			}
		})
	}
}

// TestTakingOverReadsWhatTheOwnerBeforeRecorded: the first ledger was recorded
// by another controller after this one had read the rows.
func TestTakingOverReadsWhatTheOwnerBeforeRecorded(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	var away atomic.Bool
	failed := make(chan struct{}, 100)
	h.store.Before = func(_ context.Context, method string) error {
		if away.Load() && method == "Agents" {
			failed <- struct{}{}
			return errors.New("the database is away")
		}
		return nil
	}
	next := h.another()
	a := fleettest.NewAgent(t, h.authority, "a")
	var ledger atomic.Pointer[uuid.UUID]
	ledger.Store(&a.Ledger)
	a.Welcome = func(_ *agentpb.Hello, w *agentpb.Welcome) error {
		w.LedgerId = ledger.Load().String()
		return nil
	}
	row := h.store.Add(a.Row(a.Start(t)))
	next.start() // reads that no ledger is on record
	h.run()
	h.session(row, 1, a.Ledger, false, false)
	h.stop()
	other := uuid.NewV4()
	ledger.Store(&other)
	away.Store(true)
	next.own(2)
	<-failed // and nobody is dialled before the rows are read
	if n := len(next.queue.Calls(fleettest.Is("up", row.Num))); n != 0 {
		t.Error("a session before the rows were read")
	}
	away.Store(false)
	next.session(row, 1, other, true, false)
}

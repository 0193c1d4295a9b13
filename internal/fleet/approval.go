package fleet

import (
	"strings"
	"uuid"
)

// What an operator approves is one ledger, by its id: every controller, and
// one that starts later, must be able to tell it from the next replacement.
// The id stands at the end of the row's StatusWhy: in the reason of the
// quarantine, where the operator sees it, and then in that of being active
// again. The row's LedgerID stays the old one until the queue has settled what
// was under way with it (see session.settle). So one write approves, nothing
// is lost in a crash, and an approved ledger that was recorded needs no
// clearing up: the text is then about the ledger on record.
const (
	ledgerMark  = " (ledger "
	ledgerClose = ")"
	// ledgerRoom is how many bytes the mark with its id takes.
	ledgerRoom = len(ledgerMark) + 36 + len(ledgerClose)
)

// withLedger ends a sentence with the id of the ledger that it is about.
func withLedger(why string, ledger uuid.UUID) string {
	why = strings.TrimRight(clean(why, maxSentence-ledgerRoom), ". ")
	return why + ledgerMark + ledger.String() + ledgerClose
}

// ledgerNamed gives the ledger that a sentence ends with, or Nil.
func ledgerNamed(why string) uuid.UUID {
	at := strings.LastIndex(why, ledgerMark)
	text, closed := strings.CutSuffix(why, ledgerClose)
	if at < 0 || !closed {
		return uuid.Nil()
	}
	id, err := uuid.Parse(text[at+len(ledgerMark):])
	if err != nil {
		return uuid.Nil()
	}
	return id
}

// approved gives the ledger that an operator has approved last, or Nil.
func (a *Agent) approved() uuid.UUID {
	if a.Status != Active {
		return uuid.Nil()
	}
	return ledgerNamed(a.StatusWhy)
}

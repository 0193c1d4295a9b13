package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"
	"uuid"

	"github.com/lib/pq"

	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/tasks"
)

type agentRow struct {
	Num         int32          `db:"num"`
	ID          uid            `db:"id"`
	Name        string         `db:"name"`
	Addresses   pq.StringArray `db:"addresses"`
	Labels      string         `db:"labels"`
	Status      string         `db:"status"`
	StatusWhy   string         `db:"status_why"`
	PausedAt    sql.NullTime   `db:"paused_at"`
	PausedBy    string         `db:"paused_by"`
	SPKI        []byte         `db:"spki"`
	CertSerial  string         `db:"cert_serial"`
	CertExpires sql.NullTime   `db:"cert_expires"`
	LedgerID    uid            `db:"ledger_id"`
	Hostname    string         `db:"hostname"`
	OS          string         `db:"os"`
	Version     string         `db:"version"`
	Facts       sql.NullString `db:"facts"`
	FactsAt     sql.NullTime   `db:"facts_at"`
	PairedAt    time.Time      `db:"paired_at"`
	PairedBy    string         `db:"paired_by"`
	Revision    int64          `db:"revision"`
}

func (r agentRow) agent() (fleet.Agent, error) {
	a := fleet.Agent{
		Num: tasks.AgentNum(r.Num), ID: uuid.UUID(r.ID), Name: r.Name, Addresses: r.Addresses,
		Status: fleet.Status(r.Status), StatusWhy: r.StatusWhy, PausedAt: instant(r.PausedAt), PausedBy: r.PausedBy,
		CertSerial: r.CertSerial, CertExpires: instant(r.CertExpires), LedgerID: uuid.UUID(r.LedgerID),
		Hostname: r.Hostname, OS: r.OS, Version: r.Version, FactsAt: instant(r.FactsAt),
		PairedAt: r.PairedAt.UTC(), PairedBy: r.PairedBy, Revision: r.Revision,
	}
	if r.Facts.Valid {
		a.Facts = json.RawMessage(r.Facts.String)
	}
	if err := json.Unmarshal([]byte(r.Labels), &a.Labels); err != nil {
		return a, fmt.Errorf("decode the labels of agent %s: %w", a.ID, err)
	}
	var err error
	a.SPKI, err = hash32(r.SPKI)
	return a, err
}

// agentColumns are the columns of agentRow, for every statement that gives one.
const agentColumns = `num, id, name, addresses, labels, status, status_why, paused_at, paused_by, spki, cert_serial,
    cert_expires, ledger_id, hostname, os, version, facts, facts_at, paired_at, paired_by, revision`

const sqlAgents = `SELECT ` + agentColumns + ` FROM agent WHERE status <> 'removed' ORDER BY num`

// Agents implements fleet.Store.
func (d *DB) Agents(ctx context.Context) ([]fleet.Agent, error) {
	var rows []agentRow
	if err := d.general.SelectContext(ctx, &rows, sqlAgents); err != nil {
		return nil, asFault(ctx, err, "read the agents")
	}
	out := make([]fleet.Agent, 0, len(rows))
	for _, r := range rows {
		a, err := r.agent()
		if err != nil {
			return nil, err
		}
		out = append(out, a)
	}
	return out, nil
}

const sqlAgentInsert = `
INSERT INTO agent (id, name, addresses, labels, status, spki, cert_serial, cert_expires, ledger_id, hostname, os, version,
    paired_at, paired_by)
VALUES ($1::uuid, $2, $3::text[], $4::jsonb, 'enrolling', $5, $6, $7, $8::uuid, $9, $10, $11, coalesce($12, now()), $13)
RETURNING ` + agentColumns

// InsertAgent implements fleet.Store. An agent that was removed may enrol
// again: it gets a new number, and its old tasks keep the old one.
func (d *DB) InsertAgent(ctx context.Context, a fleet.Agent) (fleet.Agent, error) {
	labels, err := labelText(a.Labels)
	if err != nil {
		return fleet.Agent{}, err
	}
	return d.changeAgent(ctx, "store an agent", func(tx *Tx, r *agentRow) error {
		err := tx.get(r, sqlAgentInsert, a.ID.String(), plain(a.Name), addressArray(a.Addresses), labels, a.SPKI[:], a.CertSerial,
			timeOrNull(a.CertExpires), uuidOrNull(a.LedgerID), plain(a.Hostname), plain(a.OS), plain(a.Version),
			timeOrNull(a.PairedAt), a.PairedBy)
		if sqlState(err) == stateUniqueViolation {
			return fault.Wrap(err, fault.Conflict, "agent_exists", "an agent with this id or key is enrolled already").
				WithHint("remove the enrolled agent first if this one is to take its place")
		}
		return err
	})
}

// changeAgent runs a write that gives one agent.
func (d *DB) changeAgent(ctx context.Context, what string, fn func(*Tx, *agentRow) error) (fleet.Agent, error) {
	var r agentRow
	err := d.write(ctx, what, func(tx *Tx) error {
		r = agentRow{}
		return fn(tx, &r)
	})
	if err != nil {
		return fleet.Agent{}, err
	}
	return r.agent()
}

func noAgent(ctx context.Context, err error, what string) error {
	return missing(ctx, err, "unknown_agent", "there is no such agent", what)
}

const sqlAgentConfirm = `
UPDATE agent SET status = 'active', status_why = '', revision = revision + 1
WHERE id = $1::uuid AND status IN ('enrolling', 'active')
RETURNING ` + agentColumns

// ConfirmAgent implements fleet.Store.
func (d *DB) ConfirmAgent(ctx context.Context, id uuid.UUID) (fleet.Agent, error) {
	const what = "confirm an agent"
	return d.changeAgent(ctx, what, func(tx *Tx, r *agentRow) error {
		return noAgent(tx.ctx, tx.get(r, sqlAgentConfirm, id.String()), what)
	})
}

const sqlAgentDropEnrolling = `DELETE FROM agent WHERE status = 'enrolling' AND paired_at < $1`

// DropEnrolling implements fleet.Store.
func (d *DB) DropEnrolling(ctx context.Context, before time.Time) error {
	return d.write(ctx, "drop agents that never finished to enrol", func(tx *Tx) error {
		_, err := tx.exec(sqlAgentDropEnrolling, before)
		return err
	})
}

const sqlAgentLock = `SELECT ` + agentColumns + ` FROM agent WHERE id = $1::uuid AND status <> 'removed' FOR UPDATE`

const sqlAgentChange = `
UPDATE agent SET name = $2, addresses = $3::text[], labels = $4::jsonb,
    paused_at = CASE WHEN NOT $5::boolean THEN NULL ELSE coalesce(paused_at, now()) END,
    paused_by = CASE WHEN NOT $5::boolean THEN '' WHEN paused_at IS NULL THEN $6 ELSE paused_by END,
    revision = revision + 1
WHERE num = $1
RETURNING ` + agentColumns

// ChangeAgent implements fleet.Store.
func (d *DB) ChangeAgent(ctx context.Context, id uuid.UUID, c fleet.Change, actor string) (fleet.Agent, error) {
	const what = "change an agent"
	return d.changeAgent(ctx, what, func(tx *Tx, r *agentRow) error {
		if err := tx.get(r, sqlAgentLock, id.String()); err != nil {
			return noAgent(tx.ctx, err, what)
		}
		if c.Revision != 0 && c.Revision != r.Revision {
			return fault.Newf(fault.Precondition, "revision_changed", "the agent was changed meanwhile: it is at revision %d, not %d", r.Revision, c.Revision).
				WithHint("read the agent again and repeat the change if it still makes sense")
		}
		name, addresses, labels, paused := r.Name, r.Addresses, r.Labels, r.PausedAt.Valid
		if c.Name != nil {
			name = *c.Name
		}
		if c.Addresses != nil {
			addresses = addressArray(*c.Addresses)
		}
		if c.Labels != nil {
			var err error
			if labels, err = labelText(*c.Labels); err != nil {
				return err
			}
		}
		if c.Paused != nil {
			paused = *c.Paused
		}
		num := r.Num
		*r = agentRow{}
		return tx.get(r, sqlAgentChange, num, plain(name), addresses, labels, paused, actor)
	})
}

const sqlAgentStatus = `
UPDATE agent SET status = $2, status_why = $3, status_by = $4, revision = revision + 1,
    removed_at = CASE WHEN $2 = 'removed' THEN now() END
WHERE id = $1::uuid AND status <> 'removed'
RETURNING ` + agentColumns

// SetStatus implements fleet.Store.
func (d *DB) SetStatus(ctx context.Context, id uuid.UUID, status fleet.Status, why, actor string) (fleet.Agent, error) {
	const what = "set the status of an agent"
	return d.changeAgent(ctx, what, func(tx *Tx, r *agentRow) error {
		return noAgent(tx.ctx, tx.get(r, sqlAgentStatus, id.String(), string(status), plain(why), actor), what)
	})
}

// What an agent says of itself is written only when it differs, because every
// new session says it again.
const sqlAgentSeen = `
UPDATE agent SET ledger_id = $2::uuid, version = $3, hostname = $4, os = $5
WHERE num = $1 AND (ledger_id, version, hostname, os) IS DISTINCT FROM ($2::uuid, $3, $4, $5)`

// A take-over waits for the lock as it does for a turn.
const sqlAgentSeenUnder = `SELECT shard FROM shard_lease WHERE shard = $1 AND owner = $2::uuid AND epoch = $3 FOR SHARE`

// SetSeen implements fleet.Store.
func (d *DB) SetSeen(ctx context.Context, num tasks.AgentNum, under tasks.Lease, ledger uuid.UUID, version, hostname, os string) error {
	const what = "store what an agent said of itself"
	return d.write(ctx, what, func(tx *Tx) error {
		var shard int
		if err := tx.get(&shard, sqlAgentSeenUnder, int16(under.Shard), under.Owner.String(), under.Epoch); errors.Is(err, sql.ErrNoRows) {
			return unavailable(err, "lease_lost", "another controller owns the agent now")
		} else if err != nil {
			return err
		}
		_, err := tx.exec(sqlAgentSeen, int32(num), uuidOrNull(ledger), plain(version), plain(hostname), plain(os))
		return err
	})
}

const sqlAgentFacts = `UPDATE agent SET facts = $2::json, facts_at = $3 WHERE num = $1 AND (facts_at IS NULL OR facts_at < $3)`

// SetFacts implements fleet.Store; older facts than those there are left out.
func (d *DB) SetFacts(ctx context.Context, num tasks.AgentNum, facts json.RawMessage, at time.Time) error {
	return d.write(ctx, "store an agent's inventory", func(tx *Tx) error {
		_, err := tx.exec(sqlAgentFacts, int32(num), jsonOrNull(facts), at)
		return err
	})
}

func labelText(labels map[string]string) (string, error) {
	if labels == nil {
		return "{}", nil
	}
	b, err := json.Marshal(labels)
	if err != nil {
		return "", fmt.Errorf("encode labels: %w", err)
	}
	return string(b), nil
}

func addressArray(list []string) pq.StringArray {
	return append(pq.StringArray{}, list...)
}

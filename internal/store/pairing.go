package store

import (
	"context"
	"database/sql"
	"errors"
	"time"
	"uuid"

	"headgate/internal/fault"
	"headgate/internal/fleet"
)

const sqlCAActive = `SELECT id, fleet, cert_pem, state, created_at FROM ca WHERE state = 'active'`

// ActiveCA implements fleet.Store.
func (d *DB) ActiveCA(ctx context.Context) (*fleet.CA, error) {
	var r struct {
		ID        uid       `db:"id"`
		Fleet     string    `db:"fleet"`
		CertPEM   string    `db:"cert_pem"`
		State     string    `db:"state"`
		CreatedAt time.Time `db:"created_at"`
	}
	err := d.general.GetContext(ctx, &r, sqlCAActive)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil //nolint:nilnil // no CA yet is a normal answer of the contract
	}
	if err != nil {
		return nil, asFault(ctx, err, "read the fleet's certificate authority")
	}
	return &fleet.CA{ID: uuid.UUID(r.ID), Fleet: r.Fleet, CertPEM: r.CertPEM, State: r.State, CreatedAt: r.CreatedAt.UTC()}, nil
}

// The partial unique index on the active row decides between two controllers.
const sqlCAInsert = `
INSERT INTO ca (id, fleet, cert_pem, state, created_at) VALUES ($1::uuid, $2, $3, 'active', coalesce($4, now()))
ON CONFLICT (state) WHERE state = 'active' DO NOTHING`

// InsertCA implements fleet.Store.
func (d *DB) InsertCA(ctx context.Context, ca fleet.CA) (bool, error) {
	var n int64
	err := d.write(ctx, "store the fleet's certificate authority", func(tx *Tx) (err error) {
		n, err = tx.exec(sqlCAInsert, ca.ID.String(), ca.Fleet, ca.CertPEM, timeOrNull(ca.CreatedAt))
		return err
	})
	return n == 1, err
}

const sqlEnrolInsert = `
INSERT INTO enrolment_token (id, secret_hash, created_at, created_by, expires_at, max_uses)
VALUES ($1, $2, coalesce($3, now()), $4, $5, $6)`

// InsertEnrolmentToken implements fleet.Store.
func (d *DB) InsertEnrolmentToken(ctx context.Context, t fleet.EnrolmentToken) error {
	return d.write(ctx, "store an enrolment token", func(tx *Tx) error {
		_, err := tx.exec(sqlEnrolInsert, t.ID[:], t.SecretHash[:], timeOrNull(t.CreatedAt), t.CreatedBy, t.ExpiresAt, t.MaxUses)
		return err
	})
}

const sqlEnrolLock = `
SELECT expires_at <= now() AS expired, uses >= max_uses AS spent
FROM enrolment_token WHERE id = $1 AND secret_hash = $2 FOR UPDATE`

const sqlEnrolUse = `UPDATE enrolment_token SET uses = uses + 1 WHERE id = $1`

// UseEnrolmentToken implements fleet.Store.
func (d *DB) UseEnrolmentToken(ctx context.Context, id [8]byte, secretHash [32]byte) error {
	const what = "use an enrolment token"
	return d.write(ctx, what, func(tx *Tx) error {
		var t struct {
			Expired bool `db:"expired"`
			Spent   bool `db:"spent"`
		}
		if err := tx.get(&t, sqlEnrolLock, id[:], secretHash[:]); err != nil {
			return missing(tx.ctx, err, "unknown_token", "there is no such enrolment token", what)
		}
		switch {
		case t.Expired:
			return fault.New(fault.Forbidden, "token_expired", "the enrolment token has expired").WithHint("make a new one")
		case t.Spent:
			return fault.New(fault.Forbidden, "token_used_up", "the enrolment token has been used up").WithHint("make a new one")
		}
		_, err := tx.exec(sqlEnrolUse, id[:])
		return err
	})
}

const sqlEnrolReturn = `UPDATE enrolment_token SET uses = uses - 1 WHERE id = $1 AND uses > 0`

// ReturnEnrolmentToken implements fleet.Store.
func (d *DB) ReturnEnrolmentToken(ctx context.Context, id [8]byte) error {
	return d.write(ctx, "give back an enrolment token", func(tx *Tx) error {
		_, err := tx.exec(sqlEnrolReturn, id[:])
		return err
	})
}

const sqlPairingPut = `
INSERT INTO pairing (id, address, token_id, agent_id, actor, started_at, state, detail)
VALUES ($1::uuid, $2, $3, $4::uuid, $5, $6, $7, $8)
ON CONFLICT (id) DO UPDATE
SET agent_id = EXCLUDED.agent_id, state = EXCLUDED.state, detail = EXCLUDED.detail, changed_at = now()`

// RecordPairing implements fleet.Store.
func (d *DB) RecordPairing(ctx context.Context, p fleet.Pairing) error {
	return d.write(ctx, "store the course of a pairing", func(tx *Tx) error {
		_, err := tx.exec(sqlPairingPut, p.ID.String(), plain(p.Address), p.TokenID[:], uuidOrNull(p.AgentID), p.Actor,
			p.StartedAt, p.State, plain(p.Detail))
		return err
	})
}

const sqlPairings = `
SELECT id, address, token_id, agent_id, actor, started_at, state, detail
FROM pairing ORDER BY started_at DESC, id LIMIT $1`

// Pairings implements fleet.Store.
func (d *DB) Pairings(ctx context.Context, limit int) ([]fleet.Pairing, error) {
	var rows []struct {
		ID        uid       `db:"id"`
		Address   string    `db:"address"`
		TokenID   []byte    `db:"token_id"`
		AgentID   uid       `db:"agent_id"`
		Actor     string    `db:"actor"`
		StartedAt time.Time `db:"started_at"`
		State     string    `db:"state"`
		Detail    string    `db:"detail"`
	}
	if err := d.pages.SelectContext(ctx, &rows, sqlPairings, limit); err != nil {
		return nil, asFault(ctx, err, "read the pairings")
	}
	var out []fleet.Pairing
	for _, r := range rows {
		p := fleet.Pairing{
			ID: uuid.UUID(r.ID), Address: r.Address, AgentID: uuid.UUID(r.AgentID), Actor: r.Actor,
			StartedAt: r.StartedAt.UTC(), State: r.State, Detail: r.Detail,
		}
		copy(p.TokenID[:], r.TokenID)
		out = append(out, p)
	}
	return out, nil
}

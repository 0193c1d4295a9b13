package store

import (
	"context"
	"database/sql"
	"errors"
	"maps"
	"slices"
	"time"
	"uuid"

	"headgate/internal/auth"
	"headgate/internal/fault"
)

type userRow struct {
	ID        uid          `db:"user_id"`
	Name      string       `db:"user_name"`
	Role      string       `db:"user_role"`
	CreatedAt time.Time    `db:"user_created_at"`
	Disabled  sql.NullTime `db:"user_disabled_at"`
}

func (r userRow) user() auth.User {
	return auth.User{ID: uuid.UUID(r.ID), Name: r.Name, Role: auth.Role(r.Role), CreatedAt: r.CreatedAt.UTC(), Disabled: r.Disabled.Valid}
}

const sqlUserInsert = `
INSERT INTO app_user (id, name, role) VALUES ($1::uuid, $2, $3) ON CONFLICT (name) DO NOTHING`

const sqlUserByName = `
SELECT id AS user_id, name AS user_name, role AS user_role, created_at AS user_created_at, disabled_at AS user_disabled_at
FROM app_user WHERE name = $1`

// EnsureUser implements auth.Store.
func (d *DB) EnsureUser(ctx context.Context, name string, role auth.Role) (auth.User, error) {
	var r userRow
	err := d.write(ctx, "store a user", func(tx *Tx) error {
		if _, err := tx.exec(sqlUserInsert, uuid.New().String(), name, string(role)); err != nil {
			return err
		}
		return tx.get(&r, sqlUserByName, name)
	})
	return r.user(), err
}

type tokenRow struct {
	ID        uid          `db:"id"`
	Name      string       `db:"name"`
	Role      string       `db:"role"`
	Hash      []byte       `db:"hash"`
	CreatedAt time.Time    `db:"created_at"`
	CreatedBy string       `db:"created_by"`
	ExpiresAt sql.NullTime `db:"expires_at"`
	UsedAt    sql.NullTime `db:"last_used_at"`
	RevokedAt sql.NullTime `db:"revoked_at"`
}

func (r tokenRow) token() (auth.Token, error) {
	h, err := hash32(r.Hash)
	return auth.Token{
		ID: uuid.UUID(r.ID), Name: r.Name, Role: auth.Role(r.Role), Hash: h, CreatedAt: r.CreatedAt.UTC(), CreatedBy: r.CreatedBy,
		ExpiresAt: instant(r.ExpiresAt), LastUsedAt: instant(r.UsedAt), RevokedAt: instant(r.RevokedAt),
	}, err
}

const sqlTokenInsert = `
INSERT INTO api_token (id, name, role, hash, created_at, created_by, expires_at)
VALUES ($1::uuid, $2, $3, $4, coalesce($5, now()), $6, $7)
ON CONFLICT (hash) DO NOTHING`

const sqlTokenByHash = `
SELECT id, name, role, hash, created_at, created_by, expires_at, last_used_at, revoked_at
FROM api_token WHERE hash = $1`

// EnsureToken implements auth.Store.
func (d *DB) EnsureToken(ctx context.Context, t auth.Token) (auth.Token, error) {
	if t.ID == uuid.Nil() {
		t.ID = uuid.New()
	}
	var r tokenRow
	err := d.write(ctx, "store a token", func(tx *Tx) error {
		if _, err := tx.exec(sqlTokenInsert, t.ID.String(), t.Name, string(t.Role), t.Hash[:], timeOrNull(t.CreatedAt),
			t.CreatedBy, timeOrNull(t.ExpiresAt)); err != nil {
			return err
		}
		return tx.get(&r, sqlTokenByHash, t.Hash[:])
	})
	if err != nil {
		return auth.Token{}, err
	}
	return r.token()
}

// maxTokens bounds the list of tokens, which has no pages yet.
const maxTokens = 10_000

const sqlTokens = `
SELECT id, name, role, hash, created_at, created_by, expires_at, last_used_at, revoked_at
FROM api_token ORDER BY created_at DESC, id LIMIT $1`

// Tokens implements auth.Store.
func (d *DB) Tokens(ctx context.Context) ([]auth.Token, error) {
	var rows []tokenRow
	if err := d.pages.SelectContext(ctx, &rows, sqlTokens, maxTokens); err != nil {
		return nil, asFault(ctx, err, "list the tokens")
	}
	var out []auth.Token
	for _, r := range rows {
		t, err := r.token()
		if err != nil {
			return nil, err
		}
		out = append(out, t)
	}
	return out, nil
}

// TokenByHash implements auth.Store.
func (d *DB) TokenByHash(ctx context.Context, hash [32]byte) (auth.Token, error) {
	var r tokenRow
	if err := d.general.GetContext(ctx, &r, sqlTokenByHash, hash[:]); err != nil {
		return auth.Token{}, missing(ctx, err, "unknown_token", "there is no such token", "look up a token")
	}
	return r.token()
}

const sqlTokenRevoke = `
UPDATE api_token SET revoked_at = coalesce(revoked_at, now()) WHERE id = $1::uuid`

// RevokeToken implements auth.Store.
func (d *DB) RevokeToken(ctx context.Context, id uuid.UUID) error {
	return d.write(ctx, "revoke a token", func(tx *Tx) error {
		n, err := tx.exec(sqlTokenRevoke, id.String())
		if err == nil && n == 0 {
			return fault.New(fault.NotFound, "unknown_token", "there is no such token")
		}
		return err
	})
}

// A token that was stored less than a minute ago is not written again, however
// often it is used.
const sqlTokensTouch = `
UPDATE api_token t
SET last_used_at = v.used
FROM (SELECT id, to_timestamp(used / 1000000::float8) AS used FROM unnest($1::uuid[], $2::bigint[]) v (id, used)) v
WHERE t.id = v.id AND (t.last_used_at IS NULL OR t.last_used_at < v.used - interval '1 minute')`

// TouchTokens implements auth.Store.
func (d *DB) TouchTokens(ctx context.Context, used map[uuid.UUID]time.Time) error {
	if len(used) == 0 {
		return nil
	}
	list := slices.SortedFunc(maps.Keys(used), func(a, b uuid.UUID) int { return a.Compare(b) })
	return d.write(ctx, "store when tokens were used", func(tx *Tx) error {
		_, err := tx.exec(sqlTokensTouch,
			texts(list, func(id uuid.UUID) string { return id.String() }),
			ints(list, func(id uuid.UUID) int64 { return micros(used[id]) }))
		return err
	})
}

const sqlSessionInsert = `
INSERT INTO session (hash, user_id, created_at, expires_at) VALUES ($1, $2::uuid, coalesce($3, now()), $4)`

// InsertSession implements auth.Store.
func (d *DB) InsertSession(ctx context.Context, s auth.Session) error {
	return d.write(ctx, "store a session", func(tx *Tx) error {
		_, err := tx.exec(sqlSessionInsert, s.Hash[:], s.User.ID.String(), timeOrNull(s.CreatedAt), s.ExpiresAt)
		return err
	})
}

const sqlSessionByHash = `
SELECT s.created_at, s.expires_at, u.id AS user_id, u.name AS user_name, u.role AS user_role,
       u.created_at AS user_created_at, u.disabled_at AS user_disabled_at
FROM session s JOIN app_user u ON u.id = s.user_id
WHERE s.hash = $1 AND s.expires_at > now()`

// SessionByHash implements auth.Store.
func (d *DB) SessionByHash(ctx context.Context, hash [32]byte) (auth.Session, error) {
	var r struct {
		userRow
		Created time.Time `db:"created_at"`
		Expires time.Time `db:"expires_at"`
	}
	if err := d.general.GetContext(ctx, &r, sqlSessionByHash, hash[:]); err != nil {
		return auth.Session{}, missing(ctx, err, "unknown_session", "there is no such session, or it has expired", "look up a session")
	}
	return auth.Session{Hash: hash, User: r.user(), CreatedAt: r.Created.UTC(), ExpiresAt: r.Expires.UTC()}, nil
}

const sqlSessionDelete = `DELETE FROM session WHERE hash = $1`

// DeleteSession implements auth.Store; a session that is gone is no error.
func (d *DB) DeleteSession(ctx context.Context, hash [32]byte) error {
	return d.write(ctx, "end a session", func(tx *Tx) error {
		_, err := tx.exec(sqlSessionDelete, hash[:])
		return err
	})
}

const sqlLinkInsert = `INSERT INTO sign_in_link (hash, user_id, expires_at) VALUES ($1, $2::uuid, $3)`

// InsertSignInLink implements auth.Store.
func (d *DB) InsertSignInLink(ctx context.Context, hash [32]byte, user uuid.UUID, expires time.Time) error {
	return d.write(ctx, "store a sign-in link", func(tx *Tx) error {
		_, err := tx.exec(sqlLinkInsert, hash[:], user.String(), expires)
		return err
	})
}

const sqlLinkUse = `
UPDATE sign_in_link SET used_at = now()
WHERE hash = $1 AND used_at IS NULL AND expires_at > now()
RETURNING user_id`

const sqlUserByID = `
SELECT id AS user_id, name AS user_name, role AS user_role, created_at AS user_created_at, disabled_at AS user_disabled_at
FROM app_user WHERE id = $1::uuid`

// UseSignInLink implements auth.Store.
func (d *DB) UseSignInLink(ctx context.Context, hash [32]byte) (auth.User, error) {
	var r userRow
	err := d.write(ctx, "use a sign-in link", func(tx *Tx) error {
		var user uid
		if err := tx.get(&user, sqlLinkUse, hash[:]); err != nil {
			return missing(tx.ctx, err, "unknown_link", "the sign-in link is unknown, used or expired", "use a sign-in link")
		}
		return tx.get(&r, sqlUserByID, uuid.UUID(user).String())
	})
	return r.user(), err
}

// missing turns "no rows" into NotFound; other errors keep their meaning.
func missing(ctx context.Context, err error, code, message, what string) error {
	if errors.Is(err, sql.ErrNoRows) {
		return fault.New(fault.NotFound, code, message)
	}
	return asFault(ctx, err, what)
}

// UpkeepRows bounds what one pass of Upkeep deletes of one kind, so that it
// never holds locks for long.
const UpkeepRows = 5_000

const (
	sqlDropDedup = `
DELETE FROM task_dedup WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM task_dedup WHERE expires_at <= now() ORDER BY expires_at LIMIT $1))`
	// The key of a retry has no end of its own: it goes when the task that was
	// retried has gone.
	sqlDropRetries = `
DELETE FROM task_dedup WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM task_dedup
    WHERE principal = '' AND route = 'retry' AND key::bigint < (SELECT min(id) FROM agent_task) LIMIT $1))`
	sqlDropSessions = `
DELETE FROM session WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM session WHERE expires_at <= now() ORDER BY expires_at LIMIT $1))`
	sqlDropLinks = `
DELETE FROM sign_in_link WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM sign_in_link WHERE expires_at <= now() - interval '1 day' ORDER BY expires_at LIMIT $1))`
	sqlDropPoints = `
DELETE FROM series WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM series WHERE at <= now() - interval '30 days' ORDER BY at LIMIT $1))`
)

// Upkeep deletes what has expired, a bounded number of rows at a time; call it
// once a minute, and again at once when it gives UpkeepRows. It gives the
// largest number of rows that it deleted of one kind.
func (d *DB) Upkeep(ctx context.Context) (rows int64, err error) {
	for _, q := range []string{sqlDropDedup, sqlDropRetries, sqlDropSessions, sqlDropLinks, sqlDropPoints} {
		err := d.write(ctx, "delete what has expired", func(tx *Tx) error {
			n, err := tx.exec(q, UpkeepRows)
			rows = max(rows, n)
			return err
		})
		if err != nil {
			return rows, err
		}
	}
	return rows, nil
}

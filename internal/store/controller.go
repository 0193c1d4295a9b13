package store

import (
	"context"
	"time"
	"uuid"
)

// Controller is one running controller process as the others see it.
type Controller struct {
	ID        uuid.UUID // random, new at each start; the owner in leases
	Name      string
	Addr      string    // of its controller port; "" = it has none
	Identity  uuid.UUID // the id in its certificates, kept over starts
	Host      string    // which machine it runs on: equal on one, different on two
	Version   string
	StartedAt time.Time
	SeenAt    time.Time // by the database's clock
}

// ControllerSilence is how long a controller may say nothing before it counts
// as gone: a little more than a lease, so that both end together.
const ControllerSilence = 20 * time.Second

// controllersKept is how long a controller that is gone stays in the table.
const controllersKept = 7 * 24 * time.Hour

const sqlControllerRegister = `
INSERT INTO controller (id, name, addr, version, identity, host) VALUES ($1::uuid, $2, $3, $4, $5::uuid, $6)
ON CONFLICT (id) DO UPDATE SET name = EXCLUDED.name, addr = EXCLUDED.addr, version = EXCLUDED.version, seen_at = now()`

const sqlControllerForget = `
DELETE FROM controller WHERE seen_at < now() - $1 * interval '1 millisecond' OR id = ANY ($2::uuid[])`

// RegisterController makes a controller known to the others, and forgets those
// that have been gone for a week and its own former starts, which nobody shall
// count as alive.
func (d *DB) RegisterController(ctx context.Context, c Controller, former []uuid.UUID) error {
	old := texts(former, func(id uuid.UUID) string { return id.String() })
	return d.write(ctx, "register this controller", func(tx *Tx) error {
		if _, err := tx.exec(sqlControllerForget, controllersKept.Milliseconds(), old); err != nil {
			return err
		}
		_, err := tx.exec(sqlControllerRegister, c.ID.String(), plain(c.Name), c.Addr, c.Version, uuidOrNull(c.Identity), plain(c.Host))
		return err
	})
}

const sqlControllerHeartbeat = `
UPDATE controller SET seen_at = now(), stable_at = CASE WHEN $2::boolean THEN coalesce(stable_at, now()) END
WHERE id = $1::uuid
RETURNING seen_at`

// Heartbeat says that a controller is alive, and whether it is fit to serve.
// It gives the database's time of saying so. A controller that is not
// registered is told NotFound.
func (d *DB) Heartbeat(ctx context.Context, id uuid.UUID, stable bool) (time.Time, error) {
	var at time.Time
	err := d.write(ctx, "say that this controller is alive", func(tx *Tx) error {
		err := tx.get(&at, sqlControllerHeartbeat, id.String(), stable)
		return missing(tx.ctx, err, "unknown_controller", "this controller is not registered", "say that this controller is alive")
	})
	return at.UTC(), err
}

const sqlControllersStable = `
SELECT count(*) FILTER (WHERE stable_at IS NOT NULL AND seen_at >= $2) AS stable, count(*) AS alive
FROM controller
WHERE seen_at > now() - $1 * interval '1 millisecond'`

// StableControllers counts the controllers that are alive, and of them those
// that have said since a moment of the database's clock that they are fit to
// serve: one that was killed just before cannot have.
func (d *DB) StableControllers(ctx context.Context, since time.Time) (stable, alive int, err error) {
	var n struct {
		Stable int `db:"stable"`
		Alive  int `db:"alive"`
	}
	if err := d.general.GetContext(ctx, &n, sqlControllersStable, ControllerSilence.Milliseconds(), since); err != nil {
		return 0, 0, asFault(ctx, err, "count the controllers")
	}
	return n.Stable, n.Alive, nil
}

const sqlControllerLeave = `DELETE FROM controller WHERE id = $1::uuid`

// Unregister takes a controller that stops out of the table.
func (d *DB) Unregister(ctx context.Context, id uuid.UUID) error {
	return d.write(ctx, "sign this controller off", func(tx *Tx) error {
		_, err := tx.exec(sqlControllerLeave, id.String())
		return err
	})
}

const sqlControllers = `
SELECT id, name, addr, version, started_at, seen_at, identity, host FROM controller
WHERE seen_at > now() - $1 * interval '1 millisecond'
ORDER BY started_at, id`

// Controllers gives those that are alive, oldest first.
func (d *DB) Controllers(ctx context.Context) ([]Controller, error) {
	var rows []struct {
		ID        uid       `db:"id"`
		Name      string    `db:"name"`
		Addr      string    `db:"addr"`
		Version   string    `db:"version"`
		StartedAt time.Time `db:"started_at"`
		SeenAt    time.Time `db:"seen_at"`
		Identity  uid       `db:"identity"`
		Host      string    `db:"host"`
	}
	if err := d.general.SelectContext(ctx, &rows, sqlControllers, ControllerSilence.Milliseconds()); err != nil {
		return nil, asFault(ctx, err, "list the controllers")
	}
	var out []Controller
	for _, r := range rows {
		out = append(out, Controller{
			ID: uuid.UUID(r.ID), Name: r.Name, Addr: r.Addr, Version: r.Version,
			StartedAt: r.StartedAt.UTC(), SeenAt: r.SeenAt.UTC(), Identity: uuid.UUID(r.Identity), Host: r.Host,
		})
	}
	return out, nil
}

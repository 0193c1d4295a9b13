package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/lib/pq"
)

// A pooler in transaction mode, such as PgBouncer, gives each transaction
// another session of the server. So settings of a session, prepared statements
// and LISTEN have no place there. Behind one, a connection here begins every
// transaction with its settings (SET LOCAL), puts a lone query into a
// transaction for that, and prepares nothing.

// probeSetting is a setting that no pooler keeps, with a value that nobody else
// asks for.
const (
	probeSetting = "statement_timeout"
	probeValue   = "28657ms"
)

const sqlSetting = `SELECT current_setting($1)`

// stateProtocol is what a pooler answers to a setting that it does not pass on.
const stateProtocol = "08P01"

// isPooled asks whether the way to the server leads through a pooler: it
// refuses the settings of a session, or forgets them.
func (d *DB) isPooled(ctx context.Context, base pq.Config) (bool, error) {
	cfg := base.Clone()
	cfg.BinaryParameters = true
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = d.cfg.ConnectTimeout
	}
	cfg.Runtime[probeSetting] = probeValue
	connector, err := pq.NewConnectorConfig(cfg)
	if err != nil {
		return false, err
	}
	connector.Dialer(deadlineDialer{limit: d.cfg.ConnectTimeout})
	db := sql.OpenDB(connector)
	defer func() { _ = db.Close() }()
	var value string
	err = db.QueryRowContext(ctx, sqlSetting, probeSetting).Scan(&value)
	if sqlState(err) == stateProtocol && strings.Contains(err.Error(), "startup parameter") {
		return true, nil
	}
	return err == nil && value != probeValue, err
}

// localSettings gives the settings of a pool as the statement that begins each
// of its transactions.
func localSettings(settings map[string]string) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		value := settings[name]
		if name == "default_transaction_read_only" { // of the next ones; this one has begun
			name = "transaction_read_only"
		}
		b.WriteString("SET LOCAL " + name + " = " + pq.QuoteLiteral(value) + ";")
	}
	return b.String()
}

// pooledConnector makes connections that keep their settings by transaction.
type pooledConnector struct {
	driver.Connector
	settings string
}

// Connect implements driver.Connector.
func (p pooledConnector) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := p.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	full, ok := c.(fullConn)
	if !ok {
		return nil, errors.Join(errors.New("the driver lacks a method that is needed behind a pooler"), c.Close())
	}
	return &pooledConn{fullConn: full, settings: p.settings}, nil
}

// fullConn is what a connection of lib/pq can do and database/sql uses.
type fullConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.QueryerContext
	driver.ExecerContext
	driver.NamedValueChecker
	driver.Pinger
	driver.SessionResetter
	driver.Validator
}

type pooledConn struct {
	fullConn
	settings string
	inTx     bool
}

// BeginTx implements driver.ConnBeginTx.
func (c *pooledConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	tx, err := c.fullConn.BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	if _, err := c.fullConn.ExecContext(ctx, c.settings, nil); err != nil {
		return nil, errors.Join(err, tx.Rollback())
	}
	c.inTx = true
	return &pooledTx{Tx: tx, conn: c}, nil
}

// ExecContext implements driver.ExecerContext.
func (c *pooledConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	if c.inTx {
		return c.fullConn.ExecContext(ctx, query, args)
	}
	tx, err := c.BeginTx(ctx, driver.TxOptions{})
	if err != nil {
		return nil, err
	}
	r, err := c.fullConn.ExecContext(ctx, query, args)
	if err != nil {
		return nil, endFailed(tx, err)
	}
	return r, tx.Commit()
}

// QueryContext implements driver.QueryerContext.
func (c *pooledConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	if c.inTx {
		return c.fullConn.QueryContext(ctx, query, args)
	}
	tx, err := c.BeginTx(ctx, driver.TxOptions{})
	if err != nil {
		return nil, err
	}
	rows, err := c.fullConn.QueryContext(ctx, query, args)
	if err != nil {
		return nil, endFailed(tx, err)
	}
	return &pooledRows{Rows: rows, tx: tx}, nil
}

// endFailed rolls back after an error, which is the one to tell of.
func endFailed(tx driver.Tx, err error) error {
	_ = tx.Rollback() // a connection that has ended took it with it
	return err
}

// pooledTx tells its connection that it has ended.
type pooledTx struct {
	driver.Tx
	conn *pooledConn
}

// Commit implements driver.Tx.
func (t *pooledTx) Commit() error {
	t.conn.inTx = false
	return t.Tx.Commit()
}

// Rollback implements driver.Tx.
func (t *pooledTx) Rollback() error {
	t.conn.inTx = false
	return t.Tx.Rollback()
}

// pooledRows end their transaction when they are closed.
type pooledRows struct {
	driver.Rows
	tx     driver.Tx
	failed bool
	ended  bool
}

// Next implements driver.Rows.
func (r *pooledRows) Next(dest []driver.Value) error {
	err := r.Rows.Next(dest)
	r.failed = r.failed || err != nil && !errors.Is(err, io.EOF)
	return err
}

// Close implements driver.Rows. A caller that stops in the middle closes too.
func (r *pooledRows) Close() error {
	if r.ended {
		return nil
	}
	r.ended = true
	err := r.Rows.Close()
	if err != nil || r.failed {
		_ = r.tx.Rollback() // the error of the rows is the one to tell of
		return err
	}
	return r.tx.Commit()
}

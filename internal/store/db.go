package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"log/slog"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/jmoiron/sqlx"
	"github.com/lib/pq"
	"github.com/prometheus/client_golang/prometheus"

	"headgate/internal/auth"
	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/tasks"
)

// Defaults of Config.
const (
	// DefaultLoopConns serves up to four write loops, their refills and the
	// renewal of leases, which must never wait behind a page.
	DefaultLoopConns = 8
	// DefaultGeneralConns serves everything else that writes.
	DefaultGeneralConns = 8
	// DefaultPageConns bounds what reading pages may take from the server.
	DefaultPageConns = 8
	// DefaultStatementTimeout is longer than any statement of ours takes on a
	// loaded server and shorter than a lease.
	DefaultStatementTimeout = 10 * time.Second
	// DefaultPageTimeout ends a list that found no good way: a page that takes
	// longer is of no use to a person.
	DefaultPageTimeout = 3 * time.Second
	// DefaultSocketSlack is how much longer than statement_timeout we wait for
	// the server's bytes before the connection counts as dead.
	DefaultSocketSlack = 3 * time.Second
	// DefaultConnectTimeout bounds dialling, TLS and sign-in together.
	DefaultConnectTimeout = 5 * time.Second
	// DefaultCommitWait is how long a commit without an answer is asked after.
	DefaultCommitWait = 10 * time.Second
	// DefaultLockTimeout bounds waiting for row locks in general writes and
	// while a lost commit is settled.
	DefaultLockTimeout = 8 * time.Second

	// probeTimeout bounds each step of Probe, the socket included, so that its
	// one connection is soon made anew when the server has fallen silent.
	probeTimeout = 2 * time.Second

	// idleInTransaction ends a page's transaction that somebody forgot, before
	// its snapshot holds up the clean-up of the queue.
	idleInTransaction = 10 * time.Second
	// migrationTimeout bounds one statement of a migration, which may build an
	// index over all tasks; two connections serve it and its lock.
	migrationTimeout = 30 * time.Minute
	migrationConns   = 2
	migrationIdle    = time.Minute

	// DefaultUpkeepTimeout bounds one statement of upkeep: reading all results of
	// a partition takes seconds, and a vacuum of the queue no longer.
	DefaultUpkeepTimeout = 5 * time.Minute

	// upkeepLockTimeout is how long upkeep waits for others. Nobody waits for it
	// meanwhile, save a maker of partitions.
	upkeepLockTimeout = 3 * time.Second
	upkeepConns       = 2

	// connLifetime spreads connections again after a failover.
	connLifetime = 30 * time.Minute
)

// Config says which server to use and within which limits. Only DSN is needed.
type Config struct {
	// DSN is a lib/pq connection string or URL; several hosts are allowed. It
	// must say sslmode unless its host is a unix socket.
	DSN string
	// DirectDSN leads to the same database past a pooler in transaction mode, if
	// DSN leads through one. Write loops, wake-ups, migrations and upkeep use it.
	DirectDSN string

	LoopConns    int // of the write loops and leases
	GeneralConns int
	PageConns    int // read-only

	StatementTimeout time.Duration
	PageTimeout      time.Duration
	UpkeepTimeout    time.Duration
	SocketSlack      time.Duration
	ConnectTimeout   time.Duration
	CommitWait       time.Duration
	LockTimeout      time.Duration

	Log     *slog.Logger          // nil = none
	Metrics prometheus.Registerer // nil = none
}

func (c Config) withDefaults() Config {
	setInt := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	setTime := func(p *time.Duration, v time.Duration) {
		if *p == 0 {
			*p = v
		}
	}
	setInt(&c.LoopConns, DefaultLoopConns)
	setInt(&c.GeneralConns, DefaultGeneralConns)
	setInt(&c.PageConns, DefaultPageConns)
	setTime(&c.StatementTimeout, DefaultStatementTimeout)
	setTime(&c.PageTimeout, DefaultPageTimeout)
	setTime(&c.UpkeepTimeout, DefaultUpkeepTimeout)
	setTime(&c.SocketSlack, DefaultSocketSlack)
	setTime(&c.ConnectTimeout, DefaultConnectTimeout)
	setTime(&c.CommitWait, DefaultCommitWait)
	setTime(&c.LockTimeout, DefaultLockTimeout)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// DB is the product's database. All its methods may be called at the same
// time. Make it with Open and end it with Close.
type DB struct {
	cfg     Config
	loops   *sqlx.DB // write loops, refills, leases: plans pinned
	general *sqlx.DB
	pages   *sqlx.DB // read-only
	probes  *sqlx.DB // one connection: whether the server answers, however busy the others are
	upkeep  *sqlx.DB // retention and vacuum: long statements that give way to everybody
	admin   *sqlx.DB // migrations; opens nothing until it is used
	metrics *metrics
	turns   turnStatements
	parts   partitions
	pooled  bool // general and pages go through a pooler
	nowhere bool // so do the others, for want of a direct way

	snapshots   snapshots
	tending     tending
	consistency consistency
}

var (
	_ tasks.Store = (*DB)(nil)
	_ fleet.Store = (*DB)(nil)
	_ auth.Store  = (*DB)(nil)
)

// loopSettings keep the planner to probes by key, whatever statistics say: an
// ANALYZE of the nearly empty queue once turned a claim from 13 ms to 3.6 s.
func loopSettings() map[string]string {
	return map[string]string{
		"plan_cache_mode":   "force_generic_plan",
		"enable_seqscan":    "off",
		"enable_hashjoin":   "off",
		"enable_mergejoin":  "off",
		"enable_bitmapscan": "off",
		"jit":               "off",
		"application_name":  "headgate loops",
	}
}

// Open checks the configuration and connects once; a server that does not
// answer is a fault of kind Unavailable, so that the caller may try again.
func Open(ctx context.Context, c Config) (*DB, error) {
	c = c.withDefaults()
	base, err := readDSN(c.DSN)
	if err != nil {
		return nil, err
	}
	direct := base
	if c.DirectDSN != "" {
		if direct, err = readDSN(c.DirectDSN); err != nil {
			return nil, err
		}
	}
	d := &DB{cfg: c, metrics: newMetrics(c.Metrics)}
	if err := d.findPoolers(ctx, base, direct); err != nil {
		return nil, err
	}
	if err := d.openPools(base, direct); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	d.admin.SetConnMaxIdleTime(migrationIdle)
	d.upkeep.SetConnMaxIdleTime(migrationIdle)
	d.metrics.watchPools(c.Metrics, d)
	if err := d.Ping(ctx); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// readDSN reads a connection string and refuses one that leaves TLS open.
func readDSN(dsn string) (pq.Config, error) {
	base, err := pq.NewConfig(dsn)
	if err != nil {
		return base, fault.Wrap(err, fault.Invalid, "database_dsn", "the database connection string cannot be read").
			WithHint("write it as postgres://user@host/database?sslmode=verify-full or as host=/socket/folder dbname=name")
	}
	if !saysSSLMode(dsn) && !onlySockets(base) {
		return base, fault.New(fault.Invalid, "database_sslmode", "the database connection string does not say sslmode").
			WithHint("add sslmode=verify-full (or sslmode=disable on a trusted network)")
	}
	return base, nil
}

// findPoolers asks whether the ways to the server lead through a pooler.
func (d *DB) findPoolers(ctx context.Context, base, direct pq.Config) error {
	var err error
	if d.pooled, err = d.isPooled(ctx, base); err != nil {
		return asFault(ctx, err, "reach the database")
	}
	d.nowhere = d.pooled
	if d.cfg.DirectDSN != "" {
		if d.nowhere, err = d.isPooled(ctx, direct); err != nil {
			return asFault(ctx, err, "reach the database directly")
		}
	}
	return nil
}

// openPools makes the pools; they connect when they are used.
func (d *DB) openPools(base, direct pq.Config) error {
	c := d.cfg
	general := map[string]string{"application_name": "headgate", "lock_timeout": millis(c.LockTimeout), "jit": "off"}
	pages := map[string]string{
		"jit":                                 "off", // compiling costs more than any page may take
		"application_name":                    "headgate pages",
		"default_transaction_read_only":       "on",
		"idle_in_transaction_session_timeout": millis(idleInTransaction),
	}
	shared, own := pooling{on: d.pooled}, pooling{on: d.nowhere}
	for _, p := range []struct {
		pool     **sqlx.DB
		base     pq.Config
		through  pooling
		conns    int
		limit    time.Duration
		slack    time.Duration
		settings map[string]string
	}{
		{&d.loops, direct, own, c.LoopConns, c.StatementTimeout, c.SocketSlack, loopSettings()},
		{&d.general, base, shared, c.GeneralConns, c.StatementTimeout, c.SocketSlack, general},
		{&d.pages, base, shared, c.PageConns, c.PageTimeout, c.SocketSlack, pages},
		{&d.probes, base, shared, 1, probeTimeout, 0, map[string]string{"application_name": "headgate probe"}},
		{&d.upkeep, direct, own.bare(), upkeepConns, c.UpkeepTimeout, c.SocketSlack, upkeepSettings()},
		{&d.admin, direct, own.bare(), migrationConns, migrationTimeout, c.SocketSlack, map[string]string{"application_name": "headgate migrations"}},
	} {
		pool, err := d.pool(p.base, p.through, p.conns, p.limit, p.slack, p.settings)
		if err != nil {
			return err
		}
		*p.pool = pool
	}
	return nil
}

// pooling says how a pool deals with a pooler on its way.
type pooling struct {
	on    bool
	plain bool // without settings: its statements have no place in a transaction
}

func (p pooling) bare() pooling { return pooling{on: p.on, plain: true} }

func upkeepSettings() map[string]string {
	return map[string]string{"application_name": "headgate upkeep", "lock_timeout": millis(upkeepLockTimeout), "jit": "off"}
}

// pool makes one connection pool with its own run-time settings and deadline.
func (d *DB) pool(base pq.Config, through pooling, conns int, limit, slack time.Duration, settings map[string]string) (*sqlx.DB, error) {
	cfg := base.Clone()
	cfg.BinaryParameters = true
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = d.cfg.ConnectTimeout
	}
	cfg.ApplicationName = settings["application_name"]
	all := map[string]string{"statement_timeout": millis(limit), "timezone": "UTC"}
	maps.Copy(all, settings)
	delete(all, "application_name")
	if !through.on {
		maps.Copy(cfg.Runtime, all)
	}
	made, err := pq.NewConnectorConfig(cfg)
	if err != nil {
		return nil, fault.Wrap(err, fault.Invalid, "database_dsn", "the database connection string is not usable")
	}
	made.Dialer(deadlineDialer{limit: limit + slack})
	var connector driver.Connector = made
	if through.on && !through.plain {
		connector = pooledConnector{Connector: made, settings: localSettings(all)}
	}
	pool := sqlx.NewDb(sql.OpenDB(connector), "postgres")
	pool.SetMaxOpenConns(conns)
	pool.SetMaxIdleConns(conns)
	pool.SetConnMaxLifetime(connLifetime)
	return pool, nil
}

// Pooled says whether everything goes through a pooler in transaction mode,
// wake-ups and migrations too, which then do not work. An empty text is the
// usual answer; otherwise it is a sentence for operators.
func (d *DB) Pooled() string {
	if !d.nowhere {
		return ""
	}
	if d.cfg.DirectDSN != "" {
		return "database-direct-url leads through a pooler in transaction mode: wake-ups between controllers come up to 5 s late, and migrations cannot run; let it name the server itself"
	}
	return "database-url leads through a pooler in transaction mode: wake-ups between controllers come up to 5 s late, each turn costs one more round trip, and migrations cannot run; name the server itself in database-direct-url"
}

// Close ends all connections. Running calls fail. A connection that was broken
// already is no error.
func (d *DB) Close() error {
	d.turns.close()
	var errs []error
	for _, p := range []*sqlx.DB{d.loops, d.general, d.pages, d.probes, d.upkeep, d.admin} {
		if p == nil {
			continue
		}
		if err := p.Close(); !isNetwork(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Ping says whether the server answers and takes writes.
func (d *DB) Ping(ctx context.Context) error { return ping(ctx, d.general) }

// Probe does so on a connection of its own, which waits for no other work of
// ours. It ends within a few seconds also when the server is silent.
func (d *DB) Probe(ctx context.Context) error { return ping(ctx, d.probes) }

func ping(ctx context.Context, pool *sqlx.DB) error {
	var standby bool
	if err := pool.QueryRowxContext(ctx, sqlInRecovery).Scan(&standby); err != nil {
		return asFault(ctx, err, "reach the database")
	}
	if standby {
		return fault.New(fault.Unavailable, "database_read_only", "the database is a standby and takes no writes").
			WithHint("name the primary, or several hosts with target_session_attrs=read-write")
	}
	return nil
}

const sqlInRecovery = `SELECT pg_is_in_recovery()`

// SQL gives the migrations a pool of their own, on which a statement may take
// as long as a large index needs.
func (d *DB) SQL() *sql.DB { return d.admin.DB }

const sqlDurability = `
SELECT name, setting FROM pg_settings
WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit') AND setting = 'off'
ORDER BY name`

// CheckDurability refuses a server on which an acknowledged task could be lost
// in a crash. The caller leaves it out when the operator said so.
func (d *DB) CheckDurability(ctx context.Context) error {
	var off []struct {
		Name    string `db:"name"`
		Setting string `db:"setting"`
	}
	if err := d.general.SelectContext(ctx, &off, sqlDurability); err != nil {
		return asFault(ctx, err, "read the durability settings")
	}
	if len(off) == 0 {
		return nil
	}
	var names []string
	for _, s := range off {
		names = append(names, s.Name)
	}
	return fault.Newf(fault.Precondition, "database_not_durable",
		"the database runs with %s off: tasks that were acknowledged could be lost in a crash", strings.Join(names, ", ")).
		WithHint("turn it on, or start with --unsafe-durability if losing tasks is acceptable")
}

func millis(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

func saysSSLMode(dsn string) bool { return strings.Contains(dsn, "sslmode") }

// onlySockets says whether every host is a unix socket, where TLS has no place.
func onlySockets(c pq.Config) bool {
	isSocket := func(h string) bool { return strings.HasPrefix(h, "/") || strings.HasPrefix(h, "@") }
	if !isSocket(c.Host) {
		return false
	}
	for _, m := range c.Multi {
		if !isSocket(m.Host) {
			return false
		}
	}
	return true
}

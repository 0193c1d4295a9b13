package localpg

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"
)

// Defaults of Config.
const (
	// DefaultStartTimeout covers crash recovery over max_wal_size (1 GB) on a
	// slow disk; a warm start takes 50 ms.
	DefaultStartTimeout = 2 * time.Minute
	// DefaultStopTimeout covers the last checkpoint on a slow disk; usual are
	// 20 ms.
	DefaultStopTimeout = 30 * time.Second
	// DefaultOrphanTimeout is how long backends of a killed postmaster may go
	// on before they are told to quit. They notice by themselves at the next
	// wait; one in the middle of a long computation does not.
	DefaultOrphanTimeout = 3 * time.Second
	// DefaultFallbackDir holds clusters whose own folder the server's user
	// cannot reach.
	DefaultFallbackDir = "/var/lib/headgate"
)

const (
	// quitTimeout is the time after SIGQUIT; the postmaster itself kills its
	// children 5 s after it got that signal.
	quitTimeout = 10 * time.Second
	// readyInterval is the pause between looks whether the server is ready,
	// which it tells in a file; a warm start takes ten of them.
	readyInterval = 5 * time.Millisecond
	// evictInterval is the pause between looks whether a foreign process has
	// ended; each look walks through /proc.
	evictInterval = 20 * time.Millisecond
	// socketPort is part of the socket's name only; nothing listens on TCP.
	socketPort = 5432
	// roleName is the superuser, databaseName the database, mapName the map of
	// pg_ident.conf.
	roleName     = "headgate"
	databaseName = "headgate"
	mapName      = "headgate"
)

// Config says which cluster to start and how. Only Dir is needed.
type Config struct {
	// Dir is the data directory; its parent folders are made if missing.
	Dir string
	// BinDir is the folder of postgres and initdb; empty searches.
	BinDir string
	// User is the unprivileged OS user that runs the server when this process
	// is root; empty takes the owner of the data directory, else "headgate",
	// else "postgres". Without root it must be empty or the current user.
	User string
	// Settings are run-time parameters of PostgreSQL. Those that decide on
	// durability or on how the server is reached are refused.
	Settings map[string]string
	// FallbackDir replaces DefaultFallbackDir.
	FallbackDir string
	// InitCache, if set, is a folder in which a fresh cluster is kept and from
	// which the next one is copied (10 times faster than initdb). For tests:
	// copies share the system identifier and are not synced to disk.
	InitCache string
	// Logger receives what the server prints; nil discards it.
	Logger *slog.Logger

	StartTimeout  time.Duration // 0: DefaultStartTimeout
	StopTimeout   time.Duration // 0: DefaultStopTimeout
	OrphanTimeout time.Duration // 0: DefaultOrphanTimeout
}

func (c Config) withDefaults() Config {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.FallbackDir == "" {
		c.FallbackDir = DefaultFallbackDir
	}
	setDefault(&c.StartTimeout, DefaultStartTimeout)
	setDefault(&c.StopTimeout, DefaultStopTimeout)
	setDefault(&c.OrphanTimeout, DefaultOrphanTimeout)
	c.Settings = maps.Clone(c.Settings)
	return c
}

func setDefault(d *time.Duration, value time.Duration) {
	if *d == 0 {
		*d = value
	}
}

func (c Config) validate() error {
	var errs []error
	if c.Dir == "" {
		errs = append(errs, errors.New("localpg: Config.Dir is empty"))
	}
	fixed := pinned("")
	for _, key := range slices.Sorted(maps.Keys(c.Settings)) {
		name := strings.ToLower(strings.ReplaceAll(key, "-", "_"))
		if _, ok := fixed[name]; ok {
			errs = append(errs, fmt.Errorf("the setting %s of the private PostgreSQL cluster is fixed and cannot be changed", key))
		} else if strings.ContainsAny(key, "= \t\n") || key == "" {
			errs = append(errs, fmt.Errorf("%q is not the name of a PostgreSQL setting", key))
		}
	}
	return errors.Join(errs...)
}

// pinned gives the settings that no one may change: how the server is reached,
// where its files lie, what our reading of its log relies on, and everything
// whose absence would let an acknowledged commit be lost. They go onto the
// command line, which wins over postgresql.conf and ALTER SYSTEM.
func pinned(socketDir string) map[string]string {
	return map[string]string{
		"listen_addresses":        "",
		"port":                    fmt.Sprint(socketPort),
		"unix_socket_directories": quoteListItem(socketDir),
		"unix_socket_permissions": "0700",
		"unix_socket_group":       "",
		"data_directory":          "", // left out by args: -D says it
		"hba_file":                "", // left out by args: in the data directory
		"ident_file":              "", // left out by args: in the data directory
		"config_file":             "", // left out by args: in the data directory
		"external_pid_file":       "",
		"fsync":                   "on",
		"full_page_writes":        "on",
		"synchronous_commit":      "on",
		"ignore_invalid_pages":    "off",
		"zero_damaged_pages":      "off",
		"logging_collector":       "off",
		"log_destination":         "stderr",
		"lc_messages":             "C",
	}
}

// quoteListItem writes one element of a list setting such as
// unix_socket_directories, where a comma or a space would end it.
func quoteListItem(s string) string {
	return `"` + strings.ReplaceAll(s, `"`, `""`) + `"`
}

// serverArgs builds the command line of the server.
func (c Config) serverArgs(dir, socketDir string) []string {
	all := map[string]string{
		"cluster_name":    "headgate",
		"log_line_prefix": "[%p] ",
	}
	maps.Copy(all, c.Settings)
	maps.Copy(all, pinned(socketDir))
	for _, name := range []string{"data_directory", "hba_file", "ident_file", "config_file"} {
		delete(all, name)
	}
	args := []string{"-D", dir}
	for _, key := range slices.Sorted(maps.Keys(all)) {
		args = append(args, "-c", key+"="+all[key])
	}
	return args
}

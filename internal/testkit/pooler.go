package testkit

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/lib/pq"
)

const (
	poolerPort  = 6432 // part of the socket's name only
	poolerReady = 30 * time.Second
	poolerPoll  = 20 * time.Millisecond
)

// NewPooler starts a real PgBouncer in transaction mode in front of the cluster
// of the tests and gives the connection string through it to the database that
// dsn names. settings are further lines of its configuration. It ends with the
// test.
func NewPooler(tb testing.TB, dsn string, settings ...string) string {
	tb.Helper()
	program := FindProgram(tb, "pgbouncer", "pgbouncer")
	cfg, err := pq.NewConfig(dsn)
	if err != nil {
		tb.Fatal(err)
	}
	var owner syscall.Stat_t // of the server, as whom it may come in
	if err := syscall.Stat(Postgres(tb).Cluster().Dir(), &owner); err != nil {
		tb.Fatal(err)
	}
	base, err := makeBase()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = os.RemoveAll(base) })
	var text bytes.Buffer
	fmt.Fprintf(&text, "[databases]\n* = host=%s port=%d\n[pgbouncer]\nlisten_addr =\nlisten_port = %d\nunix_socket_dir = %s\n"+
		"auth_type = trust\nauth_file = %s/users\npool_mode = transaction\ndefault_pool_size = 4\n",
		cfg.Host, cfg.Port, poolerPort, base, base)
	for _, s := range settings {
		fmt.Fprintln(&text, s)
	}
	for name, data := range map[string]string{"ini": text.String(), "users": fmt.Sprintf("%q \"\"\n", cfg.User)} {
		if err := os.WriteFile(filepath.Join(base, name), []byte(data), 0o644); err != nil { //nolint:gosec // its user reads it
			tb.Fatal(err)
		}
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(base, int(owner.Uid), int(owner.Gid)); err != nil {
			tb.Fatal(err)
		}
	}
	startPooler(tb, program, filepath.Join(base, "ini"), owner)
	through := fmt.Sprintf("host=%s port=%d user=%s dbname=%s sslmode=disable", base, poolerPort, cfg.User, cfg.Database)
	awaitPooler(tb, through)
	return through
}

func startPooler(tb testing.TB, program Program, file string, owner syscall.Stat_t) {
	tb.Helper()
	cmd := program.Command(context.WithoutCancel(tb.Context()), file)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if os.Geteuid() == 0 { // which it refuses
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		tb.Fatalf("start PgBouncer: %v", err)
	}
	tb.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if tb.Failed() {
			tb.Logf("PgBouncer: %.6000s", out.String())
		}
	})
}

func awaitPooler(tb testing.TB, dsn string) {
	tb.Helper()
	db, err := sql.Open("postgres", dsn)
	if err != nil {
		tb.Fatal(err)
	}
	defer db.Close()
	tick := time.NewTicker(poolerPoll)
	defer tick.Stop()
	for end := time.Now().Add(poolerReady); ; <-tick.C {
		if err = db.PingContext(tb.Context()); err == nil {
			return
		}
		if time.Now().After(end) {
			tb.Fatalf("PgBouncer does not answer: %v", err)
		}
	}
}

package testkit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"regexp"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/lib/pq"

	"headgate/internal/testkit"
)

var (
	commit = regexp.MustCompile(`^COMMIT`)
	insert = regexp.MustCompile(`^INSERT`)
)

// proxied gives a proxy, a pool through it, and a pool past it, on a database
// with one table.
func proxied(t *testing.T) (p *testkit.Proxy, through, past *sql.DB) {
	t.Helper()
	dsn := testkit.EmptyDatabase(t)
	past = open(t, dsn)
	run(t, past, "CREATE TABLE n (n int)")
	p = testkit.NewProxy(t, dsn)
	return p, open(t, p.DSN()), past
}

func insertInTx(db *sql.DB) error {
	tx, err := db.Begin()
	if err != nil {
		return err
	}
	if _, err := tx.Exec("INSERT INTO n VALUES ($1)", 1); err != nil {
		_ = tx.Rollback()
		return err
	}
	return tx.Commit()
}

func requireRows(t *testing.T, db *sql.DB, want int) {
	t.Helper()
	if got := text(t, db, "SELECT count(*) FROM n"); got != fmt.Sprint(want) {
		t.Errorf("%s rows, want %d", got, want)
	}
}

func TestCommitIsDoneThoughItsReplyIsLost(t *testing.T) {
	t.Parallel()
	for name, how := range map[string]testkit.How{"FIN": testkit.FIN, "RST": testkit.RST} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, through, past := proxied(t)
			fault := p.DropReplyAfter(commit, how, 1)
			err := insertInTx(through)
			if err == nil {
				t.Fatal("the client saw a reply")
			}
			if reset := errors.Is(err, syscall.ECONNRESET); reset != (how == testkit.RST) {
				t.Errorf("error of the client: %v", err)
			}
			requireRows(t, past, 1) // at once: the answer had been awaited
			if diff := cmp.Diff([]string{"COMMIT"}, fault.Hits()); diff != "" {
				t.Error(diff)
			}
			<-fault.Hit(1)
			if err := insertInTx(through); err != nil {
				t.Errorf("after the fault was used up: %v", err)
			}
			requireRows(t, past, 2)
		})
	}
}

func TestCommitIsNotDoneWhenItIsLost(t *testing.T) {
	t.Parallel()
	p, through, past := proxied(t)
	fault := p.Arm(&testkit.Fault{Match: commit, Before: true, How: testkit.RST})
	if err := insertInTx(through); err == nil {
		t.Fatal("the client saw a reply")
	}
	<-fault.Hit(1)
	requireRows(t, past, 0)
}

// TestAutocommitIsExecutedTwice shows what the proxy is for: database/sql runs
// a statement again when the connection ends in good order before the reply.
func TestAutocommitIsExecutedTwice(t *testing.T) {
	t.Parallel()
	p, through, past := proxied(t)
	fault := p.DropReplyAfter(insert, testkit.FIN, 1)
	_, err := through.Exec("INSERT INTO n VALUES ($1)", 1)
	rows := text(t, past, "SELECT count(*) FROM n")
	t.Logf("rows %s, error %v", rows, err)
	if len(fault.Hits()) != 1 || (rows == "1") != (err != nil) {
		t.Errorf("rows %s, error %v, hits %v", rows, err, fault.Hits())
	}
}

func TestFaultChoosesItsStatement(t *testing.T) {
	t.Parallel()
	p, through, past := proxied(t)
	fault := p.Arm(&testkit.Fault{Match: insert, Skip: 2, Times: 2, How: testkit.RST})
	var failed []int
	for i := range 6 {
		// Text, prepared and unnamed statements all reach the proxy.
		var err error
		switch i % 3 {
		case 0:
			_, err = through.Exec("INSERT INTO n VALUES (0)")
		case 1:
			_, err = through.Exec("INSERT INTO n VALUES ($1)", i)
		case 2:
			var st *sql.Stmt
			if st, err = through.Prepare("INSERT INTO n VALUES ($1) RETURNING n"); err != nil {
				t.Fatal(err)
			}
			err = st.QueryRow(i).Scan(new(int))
			st.Close()
		}
		if err != nil {
			failed = append(failed, i)
		}
	}
	if diff := cmp.Diff([]int{2, 3}, failed); diff != "" {
		t.Errorf("failed (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"INSERT 0 1", "INSERT 0 1"}, fault.Hits()); diff != "" {
		t.Error(diff)
	}
	requireRows(t, past, 6)
	want := map[string]int{
		"INSERT INTO n VALUES (0)": 2, "INSERT INTO n VALUES ($1)": 2, "INSERT INTO n VALUES ($1) RETURNING n": 2,
	}
	got := p.Statements()
	for text := range got {
		if !insert.MatchString(text) {
			delete(got, text)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("statements (-want +got):\n%s", diff)
	}
}

func TestRefusedStatementIsAnsweredAndDoesNotCount(t *testing.T) {
	t.Parallel()
	p, through, past := proxied(t)
	fault := p.DropReplyAfter(insert, testkit.RST, 1)
	_, err := through.Exec("INSERT INTO missing VALUES (1)")
	if e := pq.As(err); e == nil || e.Code != "42P01" {
		t.Errorf("error of the server: %v", err)
	}
	if hits := fault.Hits(); len(hits) != 0 {
		t.Errorf("hits %v", hits)
	}
	if _, err := through.Exec("INSERT INTO n VALUES (1)"); err == nil {
		t.Error("the fault did not strike the next one")
	}
	requireRows(t, past, 1)
}

func TestLargeRowsPassUnharmed(t *testing.T) {
	t.Parallel()
	p, through, _ := proxied(t)
	fault := p.DropReplyAfter(insert, testkit.FIN, 1)
	var long string
	if err := through.QueryRow("SELECT repeat('x', $1)", 5_000_000).Scan(&long); err != nil || len(long) != 5_000_000 {
		t.Errorf("%d bytes, %v", len(long), err)
	}
	if len(fault.Hits()) != 0 {
		t.Error("struck a statement that does not match")
	}
}

func TestCopyGoesThroughUntilItsEndIsLost(t *testing.T) {
	t.Parallel()
	p, through, past := proxied(t)
	fault := p.DropReplyAfter(regexp.MustCompile(`^COPY`), testkit.RST, 1)
	lost := p.DropReplyAfter(commit, testkit.RST, 1)
	for _, want := range []int{0, 1000} { // first the COPY is hit, then its commit
		tx, err := through.Begin()
		if err != nil {
			t.Fatal(err)
		}
		st, err := tx.Prepare("COPY n FROM STDIN")
		if err != nil {
			t.Fatal(err)
		}
		for i := range 1000 {
			if _, err := st.Exec(i); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(st.Close(), tx.Commit()); err == nil {
			t.Error("every reply arrived")
		}
		requireRows(t, past, want)
	}
	if diff := cmp.Diff([]string{"COPY 1000", "COMMIT"}, append(fault.Hits(), lost.Hits()...)); diff != "" {
		t.Error(diff)
	}
}

func TestSilentServerIsSilentUntilHealed(t *testing.T) {
	t.Parallel()
	p, through, past := proxied(t)
	run(t, through, "SELECT 1")
	p.Stall()
	answered := make(chan error, 1)
	go func() { answered <- insertInTx(through) }()
	// A new connection is accepted, and nothing comes of it.
	conn, err := net.Dial("tcp", address(t, p.DSN()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte{0, 0, 0, 8, 4, 210, 22, 47}); err != nil { // asks for TLS
		t.Fatal(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	var timeout net.Error
	if _, err := conn.Read(make([]byte, 1)); !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("read while stalled: %v", err)
	}
	select {
	case err := <-answered:
		t.Errorf("answered while stalled: %v", err)
	default:
	}
	requireRows(t, past, 0)
	p.Heal()
	if err := <-answered; err != nil {
		t.Errorf("after healing: %v", err)
	}
	requireRows(t, past, 1)
	if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 1)
	if _, err := io.ReadFull(conn, answer); err != nil || answer[0] != 'N' {
		t.Errorf("request for TLS: %q, %v", answer, err)
	}
}

func address(t *testing.T, dsn string) string {
	t.Helper()
	cfg, err := pq.NewConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%s:%d", cfg.Host, cfg.Port)
}

func TestCutAndBlock(t *testing.T) {
	t.Parallel()
	p, through, _ := proxied(t)
	conn, err := through.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if n, accepted := p.Connections(); n != 1 || accepted != 1 {
		t.Errorf("connections: %d open, %d accepted", n, accepted)
	}
	p.Cut()
	if _, err := conn.ExecContext(t.Context(), "SELECT 1"); err == nil {
		t.Error("the connection lives")
	}
	run(t, through, "SELECT 1") // a new one works
	p.Block()
	if err := through.PingContext(t.Context()); err == nil {
		t.Error("connected to a server that is gone")
	}
	p.Heal()
	if err := through.PingContext(t.Context()); err != nil {
		t.Errorf("after healing: %v", err)
	}
}

func TestCancelRequestsReachTheServer(t *testing.T) {
	t.Parallel()
	_, through, past := proxied(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := through.ExecContext(ctx, "SELECT pg_sleep(600)")
		ended <- err
	}()
	const running = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND state = 'active' AND datname = current_database()"
	until(t, func() bool { return text(t, past, running) == "1" })
	cancel()
	if err := <-ended; err == nil {
		t.Error("not cancelled")
	}
	until(t, func() bool { return text(t, past, running) == "0" })
}

// until looks again and again, for what happens in the server.
func until(t *testing.T, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatal("it did not happen")
		}
	}
}

package main

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"strconv"
	"time"
)

// benchStart measures from the start of `headgate up` on the data of an
// earlier run until its public port accepts a connection.
func benchStart(ctx context.Context, b *bench) error {
	r, err := b.newRig(ctx)
	if err != nil {
		return err
	}
	var times []float64
	for range b.rounds {
		if err = r.stopUp(); err != nil {
			break
		}
		var took time.Duration
		if took, err = r.timeStart(ctx); err != nil {
			break
		}
		times = append(times, took.Seconds())
	}
	if err = errors.Join(err, r.close()); err != nil {
		return err
	}
	b.note("headgate up --agents 0 on existing data (its own PostgreSQL starts with it), until the public port accepts: %s s", list(times))
	b.figure("start_to_public_open_s", median(times), "s")
	return nil
}

// openEvery is how often the public port is tried: far below what is measured.
const openEvery = 2 * time.Millisecond

func (r *rig) timeStart(ctx context.Context) (time.Duration, error) {
	port, err := freePort(ctx)
	if err != nil {
		return 0, err
	}
	public := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	cmd := exec.Command(r.bench.headgate, r.upArgs(public)...) //nolint:noctx // it ends by TERM, then KILL
	cmd.Env = append(os.Environ(), r.env...)
	began := time.Now()
	if r.up, err = startProcess(cmd); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, upWait)
	defer cancel()
	var dialer net.Dialer
	for {
		conn, err := dialer.DialContext(ctx, "tcp", public)
		if err == nil {
			return time.Since(began), conn.Close()
		}
		if err := wait(ctx, openEvery); err != nil {
			return 0, err
		}
	}
}

func freePort(ctx context.Context) (int, error) {
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

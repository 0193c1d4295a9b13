package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// closedTime is how long the herd knocks at a port that does not open.
const closedTime = 10 * time.Second

// chaosClosed lets a herd without back-off knock at a controller whose database
// does not answer, so that its public port stays closed. Acceptance 58: what
// refusing costs.
func chaosClosed(ctx context.Context, b *bench) (err error) {
	dir, err := b.newDir()
	if err != nil {
		return err
	}
	r := &rig{bench: b, dir: dir, api: &api{token: "none"}}
	defer func() { err = errors.Join(err, r.close()) }()
	if err := r.securePort(ctx); err != nil {
		return err
	}
	cmd := exec.Command(b.headgate, append([]string{ //nolint:noctx // it ends by TERM, then KILL
		"serve", "--data", filepath.Join(dir, "headgate"), "--public-addr", r.public, "--controller-addr", "127.0.0.1:0",
		"--database-url", "postgres:///none?sslmode=disable&host=" + filepath.Join(dir, "no-socket"),
	}, r.extra...)...)
	log, err := os.Create(filepath.Join(dir, "serve.log"))
	if err != nil {
		return err
	}
	defer release(log)
	cmd.Stdout, cmd.Stderr = log, log
	if r.up, err = startProcess(cmd); err != nil {
		return err
	}
	r.run.PID = r.up.pid()
	idle, err := r.cpuDuring(ctx, closedTime)
	if err != nil {
		return err
	}
	var s herdState
	w, err := startWorker(&s, nil, "-herd")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.stop()) }()
	if err := w.order(herdOrder{Target: r.publicTarget(), Clients: herdClients}, &s); err != nil {
		return err
	}
	busy, err := r.cpuDuring(ctx, closedTime)
	if err != nil {
		return err
	}
	if err := w.order(herdOrder{}, &s); err != nil {
		return err
	}
	b.note("closed port: %d tries, %d refused; controller %s cores beside them, %s before", s.Tries, s.Refused,
		decimal(busy.Seconds()/closedTime.Seconds()), decimal(idle.Seconds()/closedTime.Seconds()))
	if s.Refused < herdClients {
		return errors.New("the herd was not refused")
	}
	return b.hold("closed_refuse_cost", (busy-idle).Seconds()/closedTime.Seconds(), refuseLimit, "cores")
}

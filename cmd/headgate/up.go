package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"headgate/internal/controller"
)

// upOptions are the flags of `up` that are not settings of the controller.
type upOptions struct {
	dir    string // absolute
	agents int
	demo   bool
}

// Limits of `up`.
const (
	maxLocalAgents = 50              // on one machine; more is what bench's simulator is for
	upTimeout      = 2 * time.Minute // until everything is ready, package installation aside
	upDrain        = 5 * time.Second // for open requests at the end
	stopParts      = 5 * time.Second // for all else; together the promise of Ctrl-C, 10 s
)

func newUpCommand() *cobra.Command {
	var opts upOptions
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start everything on this machine: database, controller and agents",
		Long: "Start a private PostgreSQL cluster, the controller and agents on this machine, paired by\n" +
			"the real protocol, and print how to reach them. Ctrl-C stops all of it; the next start\n" +
			"continues with the same agents and tasks.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runUp(cmd, opts) },
	}
	cmd.Flags().IntVar(&opts.agents, "agents", 1, "how many agents to run on this machine")
	cmd.Flags().BoolVar(&opts.demo, "demo", false, "five agents (one slow, one flaky) and a history of tasks")
	addConfigFlags(cmd.Flags())
	for name, value := range upPreset("DIR") {
		cmd.Flags().Lookup(name).DefValue = value // for help alone
	}
	return cmd
}

// runUp starts the parts in order and stops them in the reverse order.
func runUp(cmd *cobra.Command, opts upOptions) error {
	began := time.Now()
	cfg, err := upConfig(cmd, &opts)
	if err != nil {
		return err
	}
	tuneMemory(os.LookupEnv)
	log := newLogger(cfg.LogLevel)
	ctx, cancel := untilHangUp(cmd.Context())
	defer cancel()
	u := &up{opts: opts, cfg: cfg, log: log, out: cmd.OutOrStdout(), failed: make(chan error, 1)}
	runErr := u.start(ctx)
	if runErr == nil {
		u.greet(time.Since(began))
		select {
		case <-ctx.Done():
			fmt.Fprintln(os.Stderr, "stopping; press Ctrl-C again to end at once")
		case runErr = <-u.failed:
		}
	} else if ctx.Err() != nil {
		runErr = nil // stopped by the user during the start
	}
	return errors.Join(runErr, u.stop())
}

// untilHangUp ends when the terminal is closed too: what runs in it stops in
// order. Under nohup that signal is ignored, and stays so.
func untilHangUp(ctx context.Context) (context.Context, context.CancelFunc) {
	if signal.Ignored(syscall.SIGHUP) {
		return context.WithCancel(ctx)
	}
	return signal.NotifyContext(ctx, syscall.SIGHUP)
}

// upConfig gives the controller's configuration for `up`: the user's flags
// over the defaults of a private controller on loopback.
func upConfig(cmd *cobra.Command, opts *upOptions) (controller.Config, error) {
	data, err := cmd.Flags().GetString("data")
	if err != nil {
		return controller.Config{}, err
	}
	opts.dir, err = filepath.Abs(data)
	if err != nil {
		return controller.Config{}, err
	}
	if opts.demo && !cmd.Flags().Changed("agents") {
		opts.agents = len(demoAgents())
	}
	if opts.agents < 0 || opts.agents > maxLocalAgents {
		return controller.Config{}, &usageError{fmt.Errorf("--agents must be from 0 to %d, not %d", maxLocalAgents, opts.agents)}
	}
	cfg, err := configFrom(cmd, "", upPreset(opts.dir))
	cfg.Data = opts.dir
	return cfg, err
}

// upPreset gives the defaults that differ from those of `serve`.
func upPreset(dir string) map[string]string {
	return map[string]string{
		"public-addr":           "127.0.0.1:7440",
		"database-url":          privateCluster,
		"admin-token-file":      filepath.Join(dir, upTokenFile),
		"allow-loopback-agents": "true",
		"log-level":             "warn",
		"drain-timeout":         upDrain.String(),
	}
}

// upTokenFile holds the admin token of `up`, in its state directory.
const upTokenFile = "token"

// privateCluster stands for "start one here" until its address is known.
const privateCluster = "private"

// up is one running `headgate up`.
type up struct {
	opts upOptions
	cfg  controller.Config
	log  *slog.Logger
	out  io.Writer

	failed   chan error // a part that ended by itself; capacity 1
	stops    []func(context.Context) error
	ctl      *controller.Controller
	client   *client
	group    *agentGroup
	children []*localAgent

	mu  sync.Mutex // guards run, which restarts of agents rewrite
	run runFile
}

// onStop adds a step; the last one added runs first.
func (u *up) onStop(fn func(context.Context) error) { u.stops = append(u.stops, fn) }

// start brings everything up and returns when the public port is open.
func (u *up) start(ctx context.Context) error {
	if err := u.startDatabase(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, upTimeout)
	defer cancel()
	u.group = u.newAgentGroup(ctx)
	if err := u.startController(ctx); err != nil {
		return err
	}
	if err := u.startAgents(ctx); err != nil {
		return err
	}
	if err := waitFor(ctx, u.ctl.Opened(), u.failed, "the public port to open"); err != nil {
		return err
	}
	u.noteEndpoints()
	if u.opts.demo {
		if err := u.makeHistory(ctx); err != nil {
			return fmt.Errorf("make the demo's history: %w", err)
		}
	}
	return u.writeRunFile()
}

func (u *up) startController(ctx context.Context) error {
	ctl, err := controller.New(u.cfg, controller.Options{Version: version, Logger: u.log})
	if err != nil {
		return err
	}
	u.ctl = ctl
	// The directory's lock is ours: a file that is there is of a killed start.
	_ = os.Remove(filepath.Join(u.opts.dir, runFileName))
	runCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan error, 1)
	go func() {
		err := ctl.Run(runCtx)
		done <- err
		if runCtx.Err() == nil {
			u.fail(fmt.Errorf("the controller ended: %w", err))
		}
	}()
	u.onStop(func(ctx context.Context) error {
		cancel()
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			return errors.New("the controller did not stop in time")
		}
	})
	if err := waitFor(ctx, ctl.Joined(), u.failed, "the controller to join"); err != nil {
		return err
	}
	e := ctl.Endpoints()
	u.client, err = newClient(e.ControllerURL, e.CAFile, u.cfg.AdminTokenFile)
	return err
}

// waitFor waits for a signal, a failed part, or the end of the time.
func waitFor(ctx context.Context, signal <-chan struct{}, failed <-chan error, what string) error {
	select {
	case <-signal:
		return nil
	case err := <-failed:
		return err
	case <-ctx.Done():
		return fmt.Errorf("waited for %s: %w", what, context.Cause(ctx))
	}
}

// fail reports the first part that ended by itself.
func (u *up) fail(err error) {
	select {
	case u.failed <- err:
	default:
	}
}

// stop ends everything in the reverse order of the start.
func (u *up) stop() error {
	if u.announced() { // never that of another start on the same data
		_ = os.Remove(filepath.Join(u.opts.dir, runFileName))
	}
	ctx, cancel := context.WithTimeout(context.Background(), u.cfg.DrainLead+u.cfg.DrainTimeout+stopParts)
	defer cancel()
	var errs []error
	for i := len(u.stops) - 1; i >= 0; i-- {
		errs = append(errs, u.stops[i](ctx))
	}
	return errors.Join(errs...)
}

func (u *up) noteEndpoints() {
	u.mu.Lock()
	defer u.mu.Unlock()
	e := u.ctl.Endpoints()
	u.run.PublicURL, u.run.ControllerURL, u.run.CAFile = e.PublicURL, e.ControllerURL, e.CAFile
	u.run.TokenFile, u.run.DatabaseURL, u.run.PID = u.cfg.AdminTokenFile, u.cfg.DatabaseURL, os.Getpid()
}

func (u *up) writeRunFile() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.run.Agents = make([]runAgent, 0, len(u.children))
	for _, a := range u.children {
		u.run.Agents = append(u.run.Agents, a.runAgent())
	}
	return u.run.write(u.opts.dir)
}

// greet says how to reach everything.
func (u *up) greet(took time.Duration) {
	link, err := u.signInLink()
	if err != nil {
		u.log.Warn("make a sign-in link", "err", err)
		link = u.run.PublicURL + "/sign-in (paste the token)"
	}
	fmt.Fprintf(u.out, "\nHeadgate %s is ready after %.1f s. Ctrl-C stops it; the next start continues.\n\n", version, took.Seconds())
	fmt.Fprintf(u.out, "  Dashboard    %s\n               (signs in once, within 10 minutes; then %s)\n", link, u.run.PublicURL)
	fmt.Fprintf(u.out, "  API token    %s\n", u.run.TokenFile)
	fmt.Fprintf(u.out, "  Explorer     %s/swagger/\n", u.run.PublicURL)
	for _, a := range u.run.Agents {
		fmt.Fprintf(u.out, "  Agent        %s at %s\n", a.Name, a.Address)
	}
	u.printCurl()
}

// printCurl prints three commands that work as they stand. The second submits
// the same task again under the same idempotency key, which gives that task,
// and waits for its result.
func (u *up) printCurl() {
	agent := "local"
	if len(u.children) > 0 {
		agent = u.children[0].name
	}
	curl := fmt.Sprintf(`curl -sS -H "Authorization: Bearer $(cat %s)"`, shellQuote(u.run.TokenFile))
	key := strconv.FormatInt(time.Now().UnixNano(), 36)
	body := fmt.Sprintf(`-H 'Content-Type: application/json' -H 'Idempotency-Key: first-%s' -d '{"agent":"%s","kind":"core.inventory"}'`, key, agent)
	api := u.run.PublicURL + "/api/v1"
	fmt.Fprintf(u.out, "\nSubmit a task, wait for its result (the same key names the same task), list all tasks:\n\n")
	fmt.Fprintf(u.out, "  %s %s %s/tasks\n\n", curl, body, api)
	fmt.Fprintf(u.out, "  %s %s '%s/tasks?wait=30s'\n\n", curl, body, api)
	fmt.Fprintf(u.out, "  %s '%s/tasks?limit=10'\n\n", curl, api)
}

// plainPath are the characters that a POSIX shell takes as they are.
const plainPath = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/._-"

// shellQuote quotes a path for a POSIX shell only where that is needed.
func shellQuote(s string) string {
	if strings.Trim(s, plainPath) == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

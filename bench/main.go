package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// totalTime is what all benchmarks may take, partTime one of them, so that one
// which hangs leaves time to the others; chaosTime is for all trials.
const (
	totalTime = 20 * time.Minute
	partTime  = 6 * time.Minute
	chaosTime = 4 * time.Hour
)

// benchmark is one measurement; it may print several figures.
type benchmark struct {
	figures []string // any of them selects it with -only
	run     func(context.Context, *bench) error
}

// table lists all benchmarks in the order in which they run.
func table() []benchmark {
	return []benchmark{
		{[]string{"start_to_public_open_s"}, benchStart},
		{[]string{"listener_refuse_us", "listener_admit_us", "listener_admit_overhead_us", "listener_admit_vs_plain"}, benchListener},
		{[]string{"controller_port_p99_under_flood_ms", "controller_port_p50_under_flood_vs_calm"}, benchFlood},
		{[]string{
			"idle_submit_to_start_p50_ms", "idle_submit_to_start_p99_ms", "idle_submit_to_result_p50_ms",
			"idle_submit_to_result_p99_ms", "idle_latency_vs_floor",
		}, benchLatency},
		{[]string{"single_submits_per_s", "single_submit_vs_pgbench"}, benchSubmit},
		{[]string{"queue_cycles_per_s", "river_work_per_s", "queue_vs_river", "queue_vs_pgbench"}, benchQueue},
		{[]string{"batch_inserts_per_s", "insert_vs_river", "insert_vs_river_copy"}, benchInsert},
		{[]string{"rate_with_held_snapshot"}, benchSnapshot},
		{[]string{"end_to_end_tasks_per_s_100_agents"}, benchFewAgents},
		{[]string{"end_to_end_tasks_per_s_1000_agents", "end_to_end_vs_raw_grpc"}, benchManyAgents},
		{[]string{"all_agents_ready_s_1000_agents"}, benchReadyThousand},
		{[]string{"all_agents_ready_s", "fanout_1000_s", "fanout_10000_s", "list_tasks_p95_ms", "list_agents_p95_ms"}, benchLargeFleet},
		{[]string{"result_p50_at_10k_ms", "result_p99_at_10k_ms"}, benchPace},
		{[]string{"p99_beside_dead_backlog"}, benchBacklog},
		{[]string{"rss_over_plateau_mib", "agent_rss_over_plateau_mib"}, benchOutputs},
		{[]string{"memory_per_agent_kib", "memory_per_agent_vs_raw_grpc"}, benchMemory},
	}
}

// bench is what all benchmarks share.
type bench struct {
	report
	headgate string // the program
	agent    string // its neighbour
	self     string // this program, if the crews of a campaign are another build of it
	rounds   int
	window   time.Duration // of steady load in one round
	keep     bool          // leave the data folders
	sizes    campaignSizes
	profiles string // folder for CPU profiles; empty = none
}

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	b := &bench{report: report{out: out}}
	bin := flags.String("bin", "../bin", "folder of headgate and headgate-agent")
	only := flags.String("only", "", "run only the benchmarks of these figures, comma separated")
	chaos := flags.String("chaos", "", "instead of benchmarks run these trials, comma separated, or all; promises that are broken fail the run")
	list := flags.Bool("list", false, "list the figures and stop")
	flags.IntVar(&b.rounds, "rounds", 3, "alternating rounds; the median counts")
	flags.DurationVar(&b.window, "window", 8*time.Second, "steady load in one round")
	flags.BoolVar(&b.keep, "keep", false, "leave the data folders for a look")
	flags.StringVar(&b.profiles, "profiles", "", "write CPU profiles of the controller into this folder (it is built anew for that)")
	flags.IntVar(&b.sizes.kills, "kills", 500, "kills and freezes of a campaign, at least")
	flags.IntVar(&b.sizes.tasks, "tasks", 1_000_000, "acknowledged tasks of a campaign, at least")
	flags.IntVar(&b.sizes.minutes, "minutes", 90, "of a soak")
	flags.Uint64Var(&b.sizes.seed, "seed", 0, "of a campaign; 0 = a new one")
	var own role
	own.flags(flags)
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if *list {
		listFigures(out)
		return nil
	}
	if work := own.work(); work != nil {
		return work(ctx)
	}
	chosen, err := choose(table(), *only)
	if err != nil {
		return err
	}
	if err := b.findPrograms(ctx, *bin); err != nil {
		return err
	}
	if *chaos != "" {
		ctx, cancel := context.WithTimeout(ctx, chaosTime)
		defer cancel()
		b.describe()
		return b.runChaos(ctx, *chaos)
	}
	ctx, cancel := context.WithTimeout(ctx, totalTime)
	defer cancel()
	return b.runAll(ctx, chosen)
}

// role is what this program is when it runs itself.
type role struct {
	simulator, crew, place, echo string
	agents, liars                int
	herd, flood, dialer, prober  bool
}

func (r *role) flags(f *flag.FlagSet) {
	f.StringVar(&r.simulator, "simulator", "", "be the simulator with this folder")
	f.StringVar(&r.crew, "crew", "", "be a crew of agents with this folder")
	f.IntVar(&r.agents, "agents", 1, "with -simulator or -crew: how many agents")
	f.IntVar(&r.liars, "liars", 0, "with -simulator: how many of them, the last ones, misbehave")
	f.StringVar(&r.place, "place", "0:0", "with -crew: its number and port")
	f.BoolVar(&r.herd, "herd", false, "be a herd of clients")
	f.BoolVar(&r.flood, "flood", false, "be a flood of strangers")
	f.BoolVar(&r.dialer, "dialer", false, "be the clients of the comparison of listeners")
	f.BoolVar(&r.prober, "prober", false, "be a client that measures answers")
	f.StringVar(&r.echo, "echo-client", "", "be the client of the echo comparison with this folder")
}

// work gives what the role does; nil stands for none.
func (r *role) work() func(context.Context) error {
	switch {
	case r.simulator != "":
		return func(ctx context.Context) error { return runSimulator(ctx, r.simulator, r.agents, r.liars) }
	case r.crew != "":
		return func(ctx context.Context) error { return crewAt(ctx, r.crew, r.agents, r.place) }
	case r.herd:
		return runHerd
	case r.flood:
		return runFlood
	case r.prober:
		return runProber
	case r.dialer:
		return runDialer
	case r.echo != "":
		return func(ctx context.Context) error { return runEchoClient(ctx, r.echo) }
	}
	return nil
}

func listFigures(out io.Writer) {
	for _, m := range table() {
		fmt.Fprintln(out, strings.Join(m.figures, "\n"))
	}
}

// choose picks the benchmarks that give one of the named figures.
func choose(all []benchmark, only string) ([]benchmark, error) {
	if only == "" {
		return all, nil
	}
	var chosen []benchmark
	wanted := strings.Split(only, ",")
	known := map[string]bool{}
	for _, m := range all {
		for _, f := range m.figures {
			known[f] = true
		}
		if slices.ContainsFunc(m.figures, func(f string) bool { return slices.Contains(wanted, f) }) {
			chosen = append(chosen, m)
		}
	}
	for _, w := range wanted {
		if !known[w] {
			return nil, fmt.Errorf("there is no figure %q; -list names all", w)
		}
	}
	return chosen, nil
}

// findPrograms makes sure that both programs are there.
func (b *bench) findPrograms(ctx context.Context, bin string) error {
	dir, err := filepath.Abs(bin)
	if err != nil {
		return err
	}
	b.headgate, b.agent = filepath.Join(dir, "headgate"), filepath.Join(dir, "headgate-agent")
	for _, p := range []string{b.headgate, b.agent} {
		if _, err := os.Stat(p); err != nil {
			return fmt.Errorf("the program %s is missing; run `make build` in the project's folder, or `make bench`, which does it", p)
		}
	}
	if b.profiles == "" {
		return nil
	}
	return b.buildProfiled(ctx)
}

// runAll runs the benchmarks; one that fails does not keep the others from
// being run.
func (b *bench) runAll(ctx context.Context, chosen []benchmark) error {
	b.describe()
	var errs []error
	start := time.Now()
	for _, m := range chosen {
		began := time.Now()
		part, cancel := context.WithTimeout(ctx, partTime)
		err := m.run(part, b)
		cancel()
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", m.figures[0], err))
			b.note("%s FAILED: %v", m.figures[0], err)
		}
		b.note("(%s took %.0f s)", m.figures[0], time.Since(began).Seconds())
		if ctx.Err() != nil {
			break
		}
	}
	b.note("(all took %.0f s)", time.Since(start).Seconds())
	return errors.Join(errs...)
}

// newDir makes a folder that the unprivileged user of PostgreSQL can reach.
func (b *bench) newDir() (string, error) {
	dir, err := os.MkdirTemp("", "headgate-bench-")
	if err != nil {
		return "", err
	}
	return dir, os.Chmod(dir, 0o755)
}

func (b *bench) removeDir(dir string) error {
	if b.keep {
		b.note("data left in %s", dir)
		return nil
	}
	return os.RemoveAll(dir)
}

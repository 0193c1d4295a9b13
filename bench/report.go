package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// report prints figures, each in a line of its own from column 1, and notes
// beside them that begin with #.
type report struct {
	out io.Writer
	mu  sync.Mutex
}

func (r *report) line(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintln(r.out, text)
}

// note prints what explains the figures.
func (r *report) note(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	for l := range strings.SplitSeq(strings.TrimRight(text, "\n"), "\n") {
		r.line("# " + l)
	}
}

// figure prints a measured value.
func (r *report) figure(name string, value float64, unit string) {
	r.line("BENCH " + name + " " + decimal(value) + " " + unit)
}

// ratio prints how two values of one run compare.
func (r *report) ratio(name string, value float64) {
	r.line("RATIO " + name + " " + decimal(value))
}

// decimal writes a plain decimal with as many digits as mean anything.
func decimal(v float64) string {
	switch {
	case v >= 1000 || v <= -1000:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 10 || v <= -10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	default:
		return strconv.FormatFloat(v, 'f', 3, 64)
	}
}

// describe tells on what the figures were taken.
func (r *report) describe() {
	r.note("%s; Go %s; %d processors (%s), %s memory, load %s", time.Now().UTC().Format(time.RFC3339), runtime.Version(),
		runtime.NumCPU(), lineOf("/proc/cpuinfo", "model name"), lineOf("/proc/meminfo", "MemTotal"), firstLine("/proc/loadavg"))
	var u unix.Utsname
	if err := unix.Uname(&u); err == nil {
		r.note("%s %s; data in %s", unix.ByteSliceToString(u.Sysname[:]), unix.ByteSliceToString(u.Release[:]), os.TempDir())
	}
	r.note("everything runs on this machine: controller, PostgreSQL, simulated agents and load generator share its processors")
}

func firstLine(file string) string {
	data, err := os.ReadFile(file)
	if err != nil {
		return "unknown"
	}
	line, _, _ := strings.Cut(string(data), "\n")
	return line
}

func lineOf(file, name string) string {
	data, err := os.ReadFile(file)
	if err != nil {
		return "unknown"
	}
	for line := range strings.Lines(string(data)) {
		key, value, ok := strings.Cut(line, ":")
		if ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

// median gives the middle value; of an even number the lower one.
func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[(len(sorted)-1)/2]
}

// mean gives the average.
func mean(values []float64) float64 {
	var sum float64
	for _, v := range values {
		sum += v
	}
	return sum / float64(max(len(values), 1))
}

// quantile gives a quantile in milliseconds.
func quantile(times []time.Duration, q float64) float64 {
	if len(times) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(times))
	i := min(int(q*float64(len(sorted))), len(sorted)-1)
	return float64(sorted[i].Nanoseconds()) / 1e6
}

// list writes the values of single rounds.
func list(values []float64) string {
	texts := make([]string, len(values))
	for i, v := range values {
		texts[i] = decimal(v)
	}
	return strings.Join(texts, ", ")
}

// inParallel calls do for 0 to n-1 from several goroutines and gives the first
// error, after which nothing new begins.
func inParallel(workers, n int, do func(int) error) error {
	var next atomic.Int64
	var failed atomic.Bool
	var once sync.Once
	var first error
	var wg sync.WaitGroup
	for range min(workers, n) {
		wg.Go(func() {
			for !failed.Load() {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if err := do(i); err != nil {
					failed.Store(true)
					once.Do(func() { first = err })
				}
			}
		})
	}
	wg.Wait()
	return first
}

// wait pauses until d has passed or ctx ends.
func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// lookEvery is how often a condition is looked at that cannot be waited for.
const lookEvery = 20 * time.Millisecond

// waitUntil looks until the condition holds.
func waitUntil(ctx context.Context, most time.Duration, what string, holds func() (bool, error)) error {
	return waitEvery(ctx, lookEvery, most, what, holds)
}

// waitEvery is waitUntil with a pause of its own between looks.
func waitEvery(ctx context.Context, every, most time.Duration, what string, holds func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	for {
		ok, err := holds()
		if err != nil || ok {
			return err
		}
		if err := wait(ctx, every); err != nil {
			return fmt.Errorf("waited for %s: %w", what, err)
		}
	}
}

// lastLines gives the end of a text.
func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

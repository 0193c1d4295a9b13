package bugs_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

var tried = flag.String("bugs", "", "which bugs are built and must be caught: all, or names separated by commas")

// quick are those that every test run tries: one of the queue, which the
// simulation must catch within its first seeds.
var quick = []string{"bug_claim_second", "bug_ack_before_commit"}

// bug is one broken variant.
type bug struct {
	name, what, file string
	lane             []string
	old, wrong       string
}

func bugs(t *testing.T) []bug {
	t.Helper()
	files, err := filepath.Glob("bug_*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no bugs: %v", err)
	}
	var all []bug
	for _, f := range files {
		b, err := read(f)
		if err != nil {
			t.Fatalf("%s: %v", f, err)
		}
		all = append(all, b)
	}
	return all
}

func read(path string) (bug, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return bug{}, err
	}
	head, rest, ok := strings.Cut(string(raw), "--- old\n")
	old, wrong, ok2 := strings.Cut(rest, "--- new\n")
	lines := strings.Split(strings.TrimSpace(head), "\n")
	if !ok || !ok2 || len(lines) != 3 {
		return bug{}, fmt.Errorf("it must have a sentence, file:, lane:, --- old and --- new")
	}
	b := bug{name: strings.TrimSuffix(filepath.Base(path), ".txt"), what: lines[0], old: old, wrong: wrong}
	file, ok := strings.CutPrefix(lines[1], "file: ")
	lane, ok2 := strings.CutPrefix(lines[2], "lane: ")
	if !ok || !ok2 {
		return bug{}, fmt.Errorf("its second line must begin with file:, its third with lane:")
	}
	b.file, b.lane = filepath.Join("..", "..", "..", file), strings.Fields(lane)
	if !strings.HasSuffix(old, "\n\n") && strings.Count(strings.TrimSuffix(old, "\n"), "\n") == 0 {
		b.old, b.wrong = strings.TrimSuffix(old, "\n"), strings.TrimSuffix(wrong, "\n") // part of a line
	}
	return b, nil
}

// Each bug still fits into the source: its text stands there exactly once.
func TestBugsFit(t *testing.T) {
	t.Parallel()
	all := bugs(t)
	for _, b := range all {
		src, err := os.ReadFile(b.file)
		if err != nil {
			t.Errorf("%s: %v", b.name, err)
			continue
		}
		if n := strings.Count(string(src), b.old); n != 1 {
			t.Errorf("%s: its old text stands %d times in %s; adapt it to the source", b.name, n, b.file)
		}
	}
	if len(all) < 10 {
		t.Errorf("only %d bugs are left", len(all))
	}
}

// Every bug is caught by the tests that are meant for it. Without -bugs only
// the quick ones are built.
func TestBugsAreCaught(t *testing.T) {
	t.Parallel()
	names := quick
	if *tried != "" {
		names = strings.Split(*tried, ",")
	}
	if testing.Short() {
		t.Skip("builds the queue anew")
	}
	for _, b := range bugs(t) {
		if *tried != "all" && !slices.Contains(names, b.name) {
			continue
		}
		t.Run(b.name, func(t *testing.T) { // one after the other: each builds with all processors
			begin := time.Now()
			out, err := b.try(t.Context(), t.TempDir())
			took := time.Since(begin).Round(100 * time.Millisecond)
			switch {
			case err == nil:
				t.Errorf("NOT CAUGHT after %s: %s", took, b.what)
			case !strings.Contains(out, "--- FAIL"):
				t.Errorf("the tests could not be run: %v\n%s", err, out)
			default:
				t.Logf("caught in %s: %s\n%s", took, b.what, why(out))
			}
		})
	}
}

// try builds the variant and runs its tests.
func (b bug) try(ctx context.Context, dir string) (string, error) {
	src, err := os.ReadFile(b.file)
	if err != nil {
		return "", err
	}
	path, err := filepath.Abs(b.file)
	if err != nil {
		return "", err
	}
	variant, overlay := filepath.Join(dir, filepath.Base(b.file)), filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(variant, []byte(strings.Replace(string(src), b.old, b.wrong, 1)), 0o600); err != nil {
		return "", err
	}
	list, err := json.Marshal(map[string]map[string]string{"Replace": {path: variant}})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(overlay, list, 0o600); err != nil {
		return "", err
	}
	c := exec.CommandContext(ctx, "go", append([]string{"test", "-overlay", overlay, "-count=1", "-vet=off", "-timeout=5m"}, b.lane...)...)
	c.Dir = filepath.Join("..", "..", "..")
	out, err := c.CombinedOutput()
	return string(out), err
}

// why gives the first lines that say what was wrong.
func why(out string) string {
	var lines []string
	for l := range strings.Lines(out) {
		if strings.Contains(l, "_test.go:") || len(lines) > 0 {
			lines = append(lines, strings.TrimRight(l, "\n")[:min(len(l)-1, 200)])
		}
		if len(lines) == 4 {
			break
		}
	}
	return strings.Join(lines, "\n")
}

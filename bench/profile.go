package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// profiler is added to the controller's program when profiles are wanted: the
// signal starts a CPU profile, the next one ends it and adds one of all
// allocations since the start. The program that is shipped has no such door.
const profiler = `package main

import (
	"os"
	"os/signal"
	"runtime/pprof"
	"syscall"
)

func init() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	go func() {
		for range signals {
			f, err := os.Create(os.Getenv("BENCH_CPU_PROFILE"))
			if err != nil {
				panic(err)
			}
			if err := pprof.StartCPUProfile(f); err != nil {
				panic(err)
			}
			<-signals
			pprof.StopCPUProfile()
			if err := f.Close(); err != nil {
				panic(err)
			}
			if f, err = os.Create(os.Getenv("BENCH_CPU_PROFILE") + ".allocs"); err != nil {
				panic(err)
			}
			if err := pprof.Lookup("allocs").WriteTo(f, 0); err != nil {
				panic(err)
			}
			f.Close()
		}
	}()
}
`

// buildProfiled builds the controller's program with the profiler in it.
func (b *bench) buildProfiled(ctx context.Context) error {
	dir, err := filepath.Abs(b.profiles)
	if err != nil {
		return err
	}
	b.profiles = dir
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root, err := filepath.Abs("..")
	if err != nil {
		return err
	}
	source := filepath.Join(dir, "profiler.go.txt")
	if err := os.WriteFile(source, []byte(profiler), 0o644); err != nil {
		return err
	}
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {filepath.Join(root, "cmd/headgate/profiler.go"): source}})
	if err != nil {
		return err
	}
	overlayFile := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(overlayFile, overlay, 0o644); err != nil {
		return err
	}
	program := filepath.Join(dir, "headgate")
	cmd := exec.CommandContext(ctx, "go", "build", "-overlay", overlayFile, "-o", program, "./cmd/headgate")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the controller with a profiler: %w: %s", err, out)
	}
	b.headgate = program
	return nil
}

// profileFile is where the controller of a rig writes.
func (r *rig) profileFile() string { return filepath.Join(r.dir, "cpu.prof") }

// profile starts a profile; what it gives ends it and puts it into the folder.
func (r *rig) profile(what string) (end func() error, err error) {
	if r.bench.profiles == "" {
		return func() error { return nil }, nil
	}
	if err := r.up.cmd.Process.Signal(profileSignal); err != nil {
		return nil, err
	}
	return func() error {
		if err := r.up.cmd.Process.Signal(profileSignal); err != nil {
			return err
		}
		name := strings.NewReplacer(" ", "-", ",", "").Replace(what)
		to := filepath.Join(r.bench.profiles, fmt.Sprintf("%s-%s.prof", name, time.Now().Format("150405")))
		// The profile is complete when the file has been written to the end.
		var last int64 = -1
		err := waitUntil(context.Background(), 10*time.Second, "the profile", func() (bool, error) {
			info, err := os.Stat(r.profileFile() + ".allocs")
			if err != nil {
				return false, nil // not yet
			}
			done := info.Size() > 0 && info.Size() == last
			last = info.Size()
			return done, nil
		})
		if err != nil {
			return err
		}
		for _, suffix := range []string{"", ".allocs"} {
			data, err := os.ReadFile(r.profileFile() + suffix)
			if err != nil {
				return err
			}
			if err := os.WriteFile(to+suffix, data, 0o644); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

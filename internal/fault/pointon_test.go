//go:build faultpoints

package fault

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// The process that dies is this test again, told so by the environment.
func TestAProcessDiesAtItsPointAtTheNamedPass(t *testing.T) {
	const passes = 3
	if _, child := os.LookupEnv(PointsEnv); child {
		for range passes {
			Point("elsewhere")
			Point("here")
		}
		os.Exit(7) // it lived on
	}
	for what, want := range map[string]string{"here:kill@3": "killed", "here:kill@4": "lived", "here:sleep=1ms": "lived", "here:kill": "killed"} {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestAProcessDies")
		cmd.Env = append(os.Environ(), PointsEnv+"="+what)
		exit, ok := errors.AsType[*exec.ExitError](cmd.Run())
		if !ok {
			t.Fatalf("%s: the process did not fail", what)
		}
		got := "lived"
		if s, ok := exit.Sys().(syscall.WaitStatus); ok && s.Signal() == syscall.SIGKILL {
			got = "killed"
		}
		if got != want {
			t.Errorf("%s: it %s, want %s", what, got, want)
		}
	}
}

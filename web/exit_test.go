package web

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"headgate/tasks"
)

// TestTheEndOfAProgramIsPutIntoWords, also who has ended it.
// Cases P40, P41.
func TestTheEndOfAProgramIsPutIntoWords(t *testing.T) {
	t.Parallel()
	code := 0
	for _, x := range []struct {
		exit tasks.Exit
		text string
		want []fact
	}{
		{tasks.Exit{Signal: "SIGTERM"}, "ended by SIGTERM", []fact{{"Signal", "SIGTERM, not requested here"}}},
		{tasks.Exit{Signal: "SIGTERM", KilledBy: tasks.KilledByTerm, GraceMS: 5000}, "ended by SIGTERM", []fact{
			{"Signal", "SIGTERM"}, {"Ended by the agent", "SIGTERM was enough"},
		}},
		{tasks.Exit{Signal: "SIGKILL", KilledBy: tasks.KilledByKill, GraceMS: 5000, Survivors: []tasks.Process{{PID: 9, Name: "nfs"}}}, "ended by SIGKILL", []fact{
			{"Signal", "SIGKILL"}, {"Ended by the agent", "SIGKILL was needed, 5 s after SIGTERM"}, {"Could not be ended", "nfs (9)"},
		}},
		{tasks.Exit{Code: &code, LeftBehind: []tasks.Process{{PID: 7, Name: "sh"}, {PID: 8, Name: "sleep"}}}, "exit code 0", []fact{
			{"Exit code", "0"}, {"Left behind, and ended", "sh (7), sleep (8)"},
		}},
		{tasks.Exit{Code: &code, LeftBehind: []tasks.Process{{PID: 7, Name: "named"}}, Released: true}, "exit code 0", []fact{
			{"Exit code", "0"}, {"Left behind, and let go on", "named (7)"},
		}},
	} {
		list, text := exitFacts(&x.exit)
		if text != x.text {
			t.Errorf("text %q, want %q", text, x.text)
		}
		list = list[:len(list)-1] // the processor time
		if diff := cmp.Diff(x.want, list); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", x.exit, diff)
		}
	}
}

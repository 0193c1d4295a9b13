package handlers_test

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"headgate/handlers"
	"headgate/tasks"
)

// TestTheEndOfAProgramIsWrittenAsDeclared compares the encoder that is written
// by hand with that of the standard library.
func TestTheEndOfAProgramIsWrittenAsDeclared(t *testing.T) {
	t.Parallel()
	code := 3
	two := []tasks.Process{{PID: 7, Name: "daemon"}, {PID: 8, Name: "\"odd\n"}}
	for _, e := range []*tasks.Exit{
		nil,
		{},
		{Code: &code, UserMS: 1, SystemMS: 2, MaxRSSBytes: 3},
		{Signal: "SIGKILL", KilledBy: tasks.KilledByKill, GraceMS: 5000, Survivors: two},
		{SpawnError: "no such file"},
		{Code: &code, LeftBehind: two[:1], Released: true},
		{Code: &code, KilledBy: tasks.KilledByTerm, LeftBehind: two},
	} {
		want, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(handlers.ExitJSON(e))); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", e, diff)
		}
	}
}

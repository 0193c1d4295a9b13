package controller

import (
	"strings"
	"testing"
)

func TestQueueSettingsThatDoNotFitAreExplained(t *testing.T) {
	t.Parallel()
	for flags, want := range map[string]string{
		"write-loops=5":                     "write-loops: 5 is more than 4",
		"agent-depth=20,total-depth=10":     "agent-depth: 20 is more than total-depth, which is 10",
		"cancel-grace=10s,forced-grace=10s": "forced-grace: 10s is not more than cancel-grace",
		"inbox-bytes=0":                     "must be more than 0",
		"total-depth=many":                  "is not a whole number",
	} {
		src := Sources{Flags: map[string]string{"database-url": "postgres://nowhere/x"}}
		for f := range strings.SplitSeq(flags, ",") {
			name, v, _ := strings.Cut(f, "=")
			src.Flags[name] = v
		}
		if _, err := LoadConfig(src); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", flags, err, want)
		}
	}
}

func TestQueueSettingsReachTheManager(t *testing.T) {
	t.Parallel()
	c, err := LoadConfig(Sources{Flags: map[string]string{
		"public-addr": "127.0.0.1:0", "database-url": "postgres://nowhere/x", "write-loops": "3", "agent-depth": "7", "inbox-bytes": "2MiB", "forced-grace": "2m",
	}})
	if err != nil {
		t.Fatal(err)
	}
	if l := c.Queueing.Limits; c.Queueing.loops() != 3 || l.AgentDepth != 7 || l.InboxBytes != 2<<20 || l.ForcedGrace.String() != "2m0s" {
		t.Errorf("loops %d, limits %+v", c.Queueing.loops(), l)
	}
}

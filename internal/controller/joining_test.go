package controller

import (
	"regexp"
	"testing"

	"headgate/internal/testkit"
)

// A database that goes away while a controller joins ends no start: whatever
// statement it was that had no answer, it is tried again. Cases R19.
func TestJoiningOutlivesALostDatabase(t *testing.T) {
	t.Parallel()
	for name, statement := range map[string]string{
		"authority":    `FROM ca\b`,
		"agents":       `FROM agent\b`,
		"controllers":  `FROM controller\b`,
		"registration": `INSERT INTO controller\b`,
		"token":        `INSERT INTO api_token\b`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy := testkit.NewProxy(t, testkit.NewDatabase(t))
			// The driver itself tries a read again on two other connections.
			const times = 4
			lost := proxy.Arm(&testkit.Fault{Match: regexp.MustCompile(statement), How: testkit.RST, Times: times, Before: true})
			s := start(t, proxy.DSN(), t.TempDir())
			s.await("the opening of the public port", s.c.Opened())
			if n := len(lost.Hits()); n != times {
				t.Errorf("the connection was lost %d times, want %d: is the statement another one now?", n, times)
			}
		})
	}
}

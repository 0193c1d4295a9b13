package agent

import (
	"fmt"
	"log/slog"
	"math"
	"path/filepath"

	"golang.org/x/sys/unix"

	"headgate/internal/agent/program"
)

// labelOf names a run of a task in the note of the program that runs.
func labelOf(id int64, attempt int32) string { return fmt.Sprintf("%d.%d", id, attempt) }

// leftovers is what was found of tasks that ran when an earlier process of
// this agent died, by the labels of their runs. It is not changed after the
// start.
type leftovers map[string]program.Leftover

// newKeeper finds out how programs can be held together on this machine.
func newKeeper(c Config, s *state) *program.Keeper {
	if c.OwnProcess {
		// What our parent has left open is no business of the programs. An old
		// kernel cannot do it; then they have it as we do.
		_ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	}
	k := program.NewKeeper(program.Options{
		Name: s.id.String(), Record: filepath.Join(s.dir.Path(), programFile), NoCgroup: c.NoCgroup, Adopt: c.OwnProcess,
	})
	if method, why := k.Confinement(); method == program.ByCgroup {
		c.Logger.Info("programs run in cgroups of their own")
	} else {
		c.Logger.Warn("programs cannot have cgroups of their own; their processes are found by session, descent and environment", "why", why)
	}
	return k
}

// recoverLeftovers ends what programs of an earlier process have left behind,
// before anything new can start.
func recoverLeftovers(k *program.Keeper, log *slog.Logger) (leftovers, error) {
	found, err := k.Recover()
	all := leftovers{}
	for _, l := range found {
		if l.Label != "" {
			all[l.Label] = l
		}
		if len(l.Ended) > 0 {
			log.Warn("ended what an earlier start had left running", "run", l.Label, "processes", listed(l.Ended), "survivors", listed(l.Survivors))
		}
	}
	return all, err
}

// note says what was found of a run that was interrupted, "" when its task
// ran no program.
func (all leftovers) note(id int64, attempt int32) string {
	l, ok := all[labelOf(id, attempt)]
	switch {
	case !ok:
		return ""
	case len(l.Ended) == 0:
		return "Nothing of its program was alive when the agent was back."
	case len(l.Survivors) > 0:
		return "When the agent was back, this of its program could not be ended: " + listed(l.Survivors) + "."
	default:
		return "When the agent was back, this of its program was alive and was ended: " + listed(l.Ended) + "."
	}
}

// alive says whether something of an earlier attempt lives in spite of all, so
// that the task must not be started beside it.
func (all leftovers) alive(id int64, attempt int32) bool {
	for a := int32(1); a <= attempt; a++ {
		if l, ok := all[labelOf(id, a)]; ok && l.Alive() {
			return true
		}
	}
	return false
}

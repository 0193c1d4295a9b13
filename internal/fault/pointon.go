//go:build faultpoints

package fault

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// PointsOn says whether this program has fault points.
const PointsOn = true

// PointsEnv names what happens at which point, several with commas:
// before_notify:kill@3 kills the process when it comes there for the third
// time, after_send:sleep=2s@1 lets it wait. Without @ it is the first time.
const PointsEnv = "HG_FAULT"

// order is what one entry of PointsEnv says.
type order struct {
	sleep time.Duration // 0 = kill
	left  atomic.Int64  // passes until it happens
}

//nolint:gochecknoglobals // points stand anywhere in the program, and what is to happen there is decided once
var orders = sync.OnceValue(func() map[string]*order {
	all := map[string]*order{}
	text, _ := os.LookupEnv(PointsEnv)
	for entry := range strings.SplitSeq(text, ",") {
		name, what, ok := strings.Cut(entry, ":")
		if !ok {
			continue
		}
		o := &order{}
		what, times, _ := strings.Cut(what, "@")
		n, err := strconv.ParseInt(times, 10, 64)
		if err != nil {
			n = 1
		}
		o.left.Store(n)
		if d, ok := strings.CutPrefix(what, "sleep="); ok {
			if o.sleep, err = time.ParseDuration(d); err != nil {
				panic("fault point " + entry + ": " + err.Error())
			}
		}
		all[name] = o
	}
	return all
})

// Point is a place at which this process dies or waits if PointsEnv says so.
func Point(name string) {
	o := orders()[name]
	if o == nil || o.left.Add(-1) != 0 {
		return
	}
	if o.sleep > 0 {
		timer := time.NewTimer(o.sleep)
		<-timer.C
		return
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
		panic(err)
	}
	select {} // nothing happens here any more
}

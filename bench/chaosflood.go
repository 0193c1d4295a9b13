package main

import (
	"context"
	"errors"
	"time"
)

// chaosFlood lets a flood come in while honest clients and monitoring go on.
func chaosFlood(ctx context.Context, b *bench) (err error) {
	r, err := b.secureRig(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	u, err := r.underFlood(ctx, floodTime)
	if err != nil {
		return err
	}
	u.tell(b)
	return errors.Join(
		b.hold("flood_new_connection_p95_ms", quantile(u.scripts.Times, 0.95), float64(othersLimit.Milliseconds()), "ms"),
		b.hold("flood_kept_connection_p95_ms", quantile(u.tabs.Times, 0.95), float64(othersLimit.Milliseconds()), "ms"),
		b.hold("flood_controller_port_p95_ms", quantile(u.probe.Times, 0.95), float64(othersLimit.Milliseconds()), "ms"),
		b.hold("flood_failures", float64(u.scripts.Failed+u.tabs.Failed+u.probe.Failed), 0, "requests"),
		b.hold("flood_cost", u.cost(), floodCostLimit, "cores"),
	)
}

// underFlood is what was seen while a flood went on.
type underFlood struct {
	before, after          floodState
	scripts, tabs, probe   probeState
	calm                   probeState // the controller port before the flood
	idleCPU, busyCPU, took time.Duration
}

func (u *underFlood) tell(b *bench) {
	b.note("flood: %d connections made, %d refused, %d reset, %d answered; controller %s cores beside it, %s cores before",
		u.after.Made-u.before.Made, u.after.Refused-u.before.Refused, u.after.Reset-u.before.Reset, u.after.Answered-u.before.Answered,
		decimal(u.busyCPU.Seconds()/u.took.Seconds()), decimal(u.idleCPU.Seconds()/u.took.Seconds()))
	for _, p := range []struct {
		name string
		seen probeState
	}{{"scripts, a new connection each time", u.scripts}, {"tabs, one kept connection each", u.tabs}, {"controller port", u.probe}, {"controller port before", u.calm}} {
		b.note("%s: %d answers, %d failed %v, p50 %s, p95 %s, p99 %s ms", p.name, len(p.seen.Times), p.seen.Failed, p.seen.Errors,
			decimal(quantile(p.seen.Times, 0.5)), decimal(quantile(p.seen.Times, 0.95)), decimal(quantile(p.seen.Times, 0.99)))
	}
}

// cost is what the flood took of the controller, in cores, beyond the honest
// clients.
func (u *underFlood) cost() float64 {
	return (u.busyCPU - u.idleCPU).Seconds() / u.took.Seconds()
}

// underFlood runs honest clients and the prober alone at first, then with a
// flood, each for that long.
func (r *rig) underFlood(ctx context.Context, long time.Duration) (u *underFlood, err error) {
	controller, err := r.controllerTarget()
	if err != nil {
		return nil, err
	}
	u = &underFlood{took: long}
	var workers []*worker
	defer func() {
		for _, w := range workers {
			err = errors.Join(err, w.stop())
		}
	}()
	start := func(v any, arg string) *worker {
		if err != nil {
			return nil
		}
		var w *worker
		if w, err = startWorker(v, nil, arg); err == nil {
			workers = append(workers, w)
		}
		return w
	}
	scripts, tabs, probe := start(&u.scripts, "-prober"), start(&u.tabs, "-prober"), start(&u.probe, "-prober")
	stream := start(&u.before, "-flood")
	if err != nil {
		return nil, err
	}
	public := r.publicTarget()
	err = errors.Join(
		scripts.order(probeOrder{Target: public, Path: "/api/v1/tasks?limit=10", From: "127.85.0.1", Every: 500 * time.Millisecond, Clients: 10}, &u.scripts),
		tabs.order(probeOrder{Target: public, Path: "/api/v1/status", From: "127.86.0.1", Every: 200 * time.Millisecond, Clients: 10, Keep: true}, &u.tabs),
		probe.order(probeOrder{Target: controller, Path: "/livez", From: "127.0.0.1", Every: 50 * time.Millisecond}, &u.probe),
	)
	if err != nil {
		return nil, err
	}
	if u.idleCPU, err = r.cpuDuring(ctx, long); err != nil {
		return nil, err
	}
	err = errors.Join(
		scripts.order(probeOrder{}, &u.scripts), tabs.order(probeOrder{}, &u.tabs), probe.order(probeOrder{}, &u.calm),
		stream.order(floodOrder{Target: public, Rate: floodRate, Sources: floodSources}, &u.before),
	)
	if err != nil {
		return nil, err
	}
	if u.busyCPU, err = r.cpuDuring(ctx, long); err != nil {
		return nil, err
	}
	err = errors.Join(
		scripts.order(probeOrder{Stop: true}, &u.scripts), tabs.order(probeOrder{Stop: true}, &u.tabs), probe.order(probeOrder{Stop: true}, &u.probe),
		stream.order(floodOrder{}, &u.after),
	)
	return u, err
}

// cpuDuring gives what the controller's process used in a time.
func (r *rig) cpuDuring(ctx context.Context, long time.Duration) (time.Duration, error) {
	before, err := cpuOf(r.run.PID)
	if err != nil {
		return 0, err
	}
	if err := wait(ctx, long); err != nil {
		return 0, err
	}
	after, err := cpuOf(r.run.PID)
	return after - before, err
}

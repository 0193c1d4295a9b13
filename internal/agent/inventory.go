package agent

import (
	"context"
	"net"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/shirou/gopsutil/v4/cpu"
	"github.com/shirou/gopsutil/v4/disk"
	"github.com/shirou/gopsutil/v4/host"
	"github.com/shirou/gopsutil/v4/load"
	"github.com/shirou/gopsutil/v4/mem"

	"headgate/internal/agent/program"
)

const (
	// inventoryTimeout is below the kind's default, so that the reason is told
	// by name rather than by a deadline.
	inventoryTimeout = 8 * time.Second
	// mostListed bounds lists of things that a machine can have thousands of
	// (mounts and addresses of a container host).
	mostListed = 200
)

// inventory collects facts about the machine. It reads no environment and no
// command lines, where secrets lie.
type inventory struct {
	keeper *program.Keeper
	// hanging is set while a collection goes on that nobody waits for any
	// more: a dead network file system can hold one for ever, and a second
	// would hang beside it.
	hanging atomic.Bool
}

type facts struct {
	Hostname  string      `json:"hostname"`
	OS        string      `json:"os"`
	Kernel    string      `json:"kernel"`
	Arch      string      `json:"arch"`
	Virtual   string      `json:"virtualization,omitempty"`
	BootedAt  time.Time   `json:"booted_at"`
	UptimeS   uint64      `json:"uptime_seconds"`
	CPU       cpuFacts    `json:"cpu"`
	Memory    sizeFacts   `json:"memory"`
	Swap      sizeFacts   `json:"swap"`
	Disks     []diskFacts `json:"disks"`
	Addresses []string    `json:"addresses"`
	Load      []float64   `json:"load"` // over 1, 5 and 15 minutes
	// Confinement says how the processes of a program are held together.
	Confinement confinementFacts `json:"confinement"`
	Problems    []string         `json:"problems,omitempty"`
}

type confinementFacts struct {
	Method string `json:"method"`           // cgroup or process_group
	Detail string `json:"detail,omitempty"` // why it is not a cgroup
}

type cpuFacts struct {
	Model   string `json:"model"`
	Logical int    `json:"logical"`
}

type sizeFacts struct {
	TotalBytes uint64 `json:"total_bytes"`
	UsedBytes  uint64 `json:"used_bytes"`
}

type diskFacts struct {
	Mount  string `json:"mount"`
	Device string `json:"device"`
	Type   string `json:"type"`
	sizeFacts
}

func (i *inventory) Execute(ctx context.Context, _ Task) Ending {
	if !i.hanging.CompareAndSwap(false, true) {
		return Ending{
			Outcome: failed, Reason: reasonCollection,
			Detail: "An earlier inventory still hangs, most likely in a file system that does not answer.",
		}
	}
	limited, stop := context.WithTimeout(ctx, inventoryTimeout)
	defer stop()
	result := make(chan facts, 1)
	go func() {
		defer i.hanging.Store(false)
		result <- collect(limited)
	}()
	select {
	case f := <-result:
		f.Confinement.Method, f.Confinement.Detail = i.keeper.Confinement()
		return succeed(f)
	case <-limited.Done():
	}
	if ctx.Err() != nil {
		return endingOf(ctx)
	}
	return Ending{
		Outcome: failed, Reason: reasonCollection,
		Detail: "The facts could not be collected within 8 seconds, most likely because a file system does not answer.",
	}
}

// collect gives what can be had; what cannot is named in Problems.
func collect(ctx context.Context) facts {
	f := facts{Hostname: hostname(), OS: osName(), Arch: runtime.GOARCH, Disks: []diskFacts{}, Addresses: []string{}, Load: []float64{}}
	problem := func(what string, err error) bool {
		if err != nil {
			f.Problems = append(f.Problems, what+": "+err.Error())
		}
		return err != nil
	}
	if h, err := host.InfoWithContext(ctx); !problem("host", err) {
		f.Kernel, f.UptimeS = h.KernelVersion, h.Uptime
		f.BootedAt = time.Unix(int64(h.BootTime), 0).UTC()
		if h.VirtualizationRole == "guest" {
			f.Virtual = h.VirtualizationSystem
		}
	}
	if c, err := cpu.InfoWithContext(ctx); !problem("cpu", err) && len(c) > 0 {
		f.CPU.Model = c[0].ModelName
	}
	n, err := cpu.CountsWithContext(ctx, true)
	problem("cpu count", err)
	f.CPU.Logical = n
	if m, err := mem.VirtualMemoryWithContext(ctx); !problem("memory", err) {
		f.Memory = sizeFacts{m.Total, m.Used}
	}
	if m, err := mem.SwapMemoryWithContext(ctx); !problem("swap", err) {
		f.Swap = sizeFacts{m.Total, m.Used}
	}
	if l, err := load.AvgWithContext(ctx); !problem("load", err) {
		f.Load = []float64{l.Load1, l.Load5, l.Load15}
	}
	f.Addresses, err = addresses()
	problem("addresses", err)
	f.Disks, err = disks(ctx)
	problem("disks", err)
	return f
}

func disks(ctx context.Context) ([]diskFacts, error) {
	list := []diskFacts{}
	parts, err := disk.PartitionsWithContext(ctx, false)
	seen := map[string]bool{}
	for _, p := range parts {
		if seen[p.Device] || len(list) == mostListed || ctx.Err() != nil {
			continue // one device may be mounted in many places
		}
		u, uerr := disk.UsageWithContext(ctx, p.Mountpoint)
		if uerr != nil || u.Total == 0 {
			continue
		}
		seen[p.Device] = true
		list = append(list, diskFacts{p.Mountpoint, p.Device, p.Fstype, sizeFacts{u.Total, u.Used}})
	}
	if !slices.ContainsFunc(list, func(d diskFacts) bool { return d.Mount == "/" }) {
		// A container's root is an overlay, which is not listed as a disk.
		if u, uerr := disk.UsageWithContext(ctx, "/"); uerr == nil {
			list = slices.Insert(list, 0, diskFacts{"/", "", u.Fstype, sizeFacts{u.Total, u.Used}})
		}
	}
	return list, err
}

// addresses gives those by which other machines may reach this one.
func addresses() ([]string, error) {
	list := []string{}
	all, err := net.InterfaceAddrs()
	for _, a := range all {
		ip, ok := a.(*net.IPNet)
		if !ok || ip.IP.IsLoopback() || ip.IP.IsLinkLocalUnicast() || len(list) == mostListed {
			continue
		}
		list = append(list, ip.IP.String())
	}
	return list, err
}

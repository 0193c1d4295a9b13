package controller

import (
	"math"
	"runtime/debug"
	"runtime/metrics"

	"headgate/listener"
)

// resources is what this process has taken of what is bounded; a limit of 0
// means that there is none, or that it cannot be known here.
type resources struct {
	Descriptors, DescriptorLimit float64
	Memory, MemoryLimit          float64 // bytes that no collection gives back
}

// ownResources looks at this process.
func ownResources() resources {
	var r resources
	if used, limit := listener.Descriptors(); used > 0 {
		r.Descriptors, r.DescriptorLimit = float64(used), float64(limit)
	}
	if most := debug.SetMemoryLimit(-1); most < math.MaxInt64 { // a negative value only reads
		r.Memory, r.MemoryLimit = liveMemory(), float64(most)
	}
	return r
}

// liveMemory gives the bytes that stay after a collection. What the process
// holds in all says little: the collector lets that rise to the limit.
func liveMemory() float64 {
	const live, total, released = "/gc/heap/live:bytes", "/memory/classes/total:bytes", "/memory/classes/heap/released:bytes"
	const free, unused, objects = "/memory/classes/heap/free:bytes", "/memory/classes/heap/unused:bytes", "/memory/classes/heap/objects:bytes"
	names := []string{live, total, released, free, unused, objects}
	samples := make([]metrics.Sample, len(names))
	for i, name := range names {
		samples[i].Name = name
	}
	metrics.Read(samples)
	value := map[string]float64{}
	for _, s := range samples {
		if s.Value.Kind() == metrics.KindUint64 {
			value[s.Name] = float64(s.Value.Uint64())
		}
	}
	return value[live] + value[total] - value[released] - value[free] - value[unused] - value[objects]
}

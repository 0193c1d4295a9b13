package tasks

import (
	"math"
	"time"
)

// histogram counts durations in buckets that grow by a factor of the square
// root of two, from 0.1 ms on: any quantile is right within a fifth.
type histogram struct {
	count   uint64
	buckets [histBuckets]uint32
}

const (
	histBuckets = 64 // up to 0.1 ms * 2^32: more than a day
	histMin     = 100 * time.Microsecond
)

func bucketOf(d time.Duration) int {
	if d <= histMin {
		return 0
	}
	return min(histBuckets-1, int(math.Ceil(2*math.Log2(float64(d)/float64(histMin)))))
}

// bucketEnd is the longest duration of a bucket.
func bucketEnd(i int) time.Duration {
	return time.Duration(float64(histMin) * math.Exp2(float64(i)/2))
}

func (h *histogram) add(d time.Duration) {
	h.count++
	h.buckets[bucketOf(d)]++
}

func (h *histogram) merge(o *histogram) {
	h.count += o.count
	for i := range h.buckets {
		h.buckets[i] += o.buckets[i]
	}
}

// quantile gives the bound below which the share q lies; 0 without any.
func (h *histogram) quantile(q float64) time.Duration {
	if h.count == 0 {
		return 0
	}
	want := uint64(math.Ceil(q * float64(h.count)))
	var sum uint64
	for i, n := range h.buckets {
		if sum += uint64(n); sum >= want {
			return bucketEnd(i)
		}
	}
	return bucketEnd(histBuckets - 1)
}

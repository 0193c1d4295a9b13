// Package admission provides the data structures that decide who may come in
// and when: source keys, token buckets, a pacer with slow start, a fair queue
// of two lanes and a bounded table of sources. They have no goroutines, no
// locks and no clock: the caller brings the time, holds a lock around every
// call, and sleeps until the moment that they name. They know nothing of
// connections, so the same code paces what comes in and what is dialled.
//
// Times should come from time.Now and keep its monotonic part. A clock that
// steps back never refills anything.
package admission

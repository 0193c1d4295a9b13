package admission

import (
	"container/heap"
	"time"
)

// Lane is one of the two lanes of a Queue.
type Lane int

// The lanes.
const (
	First  Lane = iota // served by the greater weight
	Second             // never less than its weight while it has somebody to serve
)

// QueueConfig bounds a Queue. It may be changed while the queue is in use;
// what waits already stays.
type QueueConfig struct {
	Cap       int           // items in all; 0: no bound
	CapPerKey int           // items of one key; 0: no bound
	CapFirst  int           // of one key of the first lane; 0: CapPerKey
	MaxWait   time.Duration // 0: for ever
	Weights   [2]int        // of the lanes; both 0: 4 and 1. A lane of weight 0 gets only what the other leaves.
}

// perKey gives how many items a key of a lane may have; 0: no bound.
func (c QueueConfig) perKey(l Lane) int {
	if l == First && c.CapFirst > 0 {
		return c.CapFirst
	}
	return c.CapPerKey
}

// Push says what became of an item.
type Push int

// What can become of an item.
const (
	Queued    Push = iota // it waits
	Displaced             // it waits; the item returned lost its place to it
	KeyFull               // it was not taken: its key has as many as it may
	AllFull               // it was not taken: the queue is full, and of others who have less
)

// Queue is a fair queue of items of type T that belong to keys of type K: first
// in, first out within a key, round robin over the keys of a lane, and two
// lanes that share by weight. A key that may not go yet is parked and does not
// hold up the others. All operations but UnparkAll take constant time or, with
// parked keys, that of a heap. Make it by NewQueue.
type Queue[K comparable, T any] struct {
	cfg    QueueConfig
	keys   map[K]*waiting[K, T]
	lanes  [2]lane[K, T]
	turn   int // within the sum of the weights: whose turn it is
	parked parkedHeap[K, T]

	oldest, newest *place[K, T] // all items by age

	// Used parts are kept for the next, so that a queue at work does not
	// allocate. There are never more than the most that waited at one time.
	freePlaces *place[K, T]
	freeKeys   *waiting[K, T]
}

// lane is the ring of the keys that can be asked, and all keys by length.
type lane[K comparable, T any] struct {
	items    int
	held     bool           // nobody of it is served
	ready    *waiting[K, T] // the key whose turn it is, in a circle
	byLength []*waiting[K, T]
	longest  int
}

// waiting is one key with its items.
type waiting[K comparable, T any] struct {
	key         K
	lane        Lane
	head, tail  *place[K, T]
	items       int
	prev, next  *waiting[K, T] // in the ring; nil while parked
	peerPrev    *waiting[K, T] // among the keys of the same length
	peerNext    *waiting[K, T]
	parkedUntil time.Time // zero while parked without an end
	parkedAt    int       // index in the heap; -1: not there
}

// place is one item.
type place[K comparable, T any] struct {
	item         T
	since        time.Time
	of           *waiting[K, T]
	ahead        *place[K, T] // of the same key
	behind       *place[K, T]
	older, newer *place[K, T] // of all
}

// NewQueue makes an empty queue.
func NewQueue[K comparable, T any](cfg QueueConfig) *Queue[K, T] {
	q := &Queue[K, T]{keys: make(map[K]*waiting[K, T])}
	q.SetConfig(cfg)
	return q
}

// SetConfig changes the bounds from now on; nobody loses a place by it.
func (q *Queue[K, T]) SetConfig(cfg QueueConfig) {
	if cfg.Weights == [2]int{} {
		cfg.Weights = [2]int{4, 1}
	}
	q.cfg, q.turn = cfg, 0
}

// Len gives the number of items in a lane.
func (q *Queue[K, T]) Len(l Lane) int { return q.lanes[l].items }

// Total gives the number of items.
func (q *Queue[K, T]) Total() int { return q.lanes[First].items + q.lanes[Second].items }

// LenKey gives the number of items of a key.
func (q *Queue[K, T]) LenKey(key K) int {
	if w := q.keys[key]; w != nil {
		return w.items
	}
	return 0
}

// Push adds an item at the end of its key, which moves to the lane given if it
// was in the other. When the queue is full, the newest item of the longest key
// loses its place: a key of the other lane if that has more than its share, or
// one of this lane that has more items than this key will have; it is returned with
// Displaced. Otherwise the item itself is not taken.
func (q *Queue[K, T]) Push(now time.Time, l Lane, key K, item T) (lost T, what Push) {
	w := q.keys[key]
	own := 0
	if w != nil {
		own = w.items
	}
	if most := q.cfg.perKey(l); most > 0 && own >= most {
		return lost, KeyFull
	}
	if q.cfg.Cap > 0 && q.Total() >= q.cfg.Cap {
		victim := q.victim(l, own)
		if victim == nil {
			return lost, AllFull
		}
		lost, what = q.remove(victim.tail), Displaced
		w = q.keys[key] // the victim may have been the last item of this key in the other lane
	}
	if w == nil {
		w = q.newKey(key, l)
	} else if w.lane != l {
		q.changeLane(w, l)
	}
	q.append(w, q.newPlace(now, item))
	return lost, what
}

// victim gives the key that makes room for an item in lane l whose key has own
// items; nil when nobody has to.
func (q *Queue[K, T]) victim(l Lane, own int) *waiting[K, T] {
	mine, other := &q.lanes[l], &q.lanes[1-l]
	if sum := q.cfg.Weights[First] + q.cfg.Weights[Second]; mine.items*sum < q.cfg.Cap*q.cfg.Weights[l] && other.items > 0 {
		return other.byLength[other.longest]
	}
	if mine.longest > own+1 { // or the places would only change hands
		return mine.byLength[mine.longest]
	}
	return nil
}

// Pop gives the item whose turn it is. It asks may for each key in its turn; a
// key that may not go is parked until the moment that may names, or, if that is
// the zero time, until Unpark. ok is false when nobody may go now.
func (q *Queue[K, T]) Pop(now time.Time, may func(K) (ok bool, at time.Time)) (item T, key K, ok bool) {
	q.wake(now)
	for {
		l, found := q.whoseTurn()
		if !found {
			return item, key, false
		}
		w := q.lanes[l].ready
		if ok, at := may(w.key); !ok {
			q.park(w, at)
			continue
		}
		q.served(l)
		q.lanes[l].ready = w.next
		key = w.key
		return q.remove(w.head), key, true
	}
}

// Hold keeps a whole lane waiting, or lets it go on; its items keep their
// places and expire as ever.
func (q *Queue[K, T]) Hold(l Lane, held bool) { q.lanes[l].held = held }

// whoseTurn gives the lane to serve now.
func (q *Queue[K, T]) whoseTurn() (Lane, bool) {
	l := Second
	if q.turn < q.cfg.Weights[First] {
		l = First
	}
	if !q.lanes[l].servable() {
		l = 1 - l
	}
	return l, q.lanes[l].servable()
}

// servable reports whether the lane has a key whose turn it can be.
func (l *lane[K, T]) servable() bool { return l.ready != nil && !l.held }

// served moves the turn on if it was that lane's. A lane that is served in the
// place of the other does not use the other's turn up.
func (q *Queue[K, T]) served(l Lane) {
	if (q.turn < q.cfg.Weights[First]) == (l == First) {
		q.turn = (q.turn + 1) % (q.cfg.Weights[First] + q.cfg.Weights[Second])
	}
}

// Expire gives an item that has waited for MaxWait and takes it out; ok is
// false when there is none (more).
func (q *Queue[K, T]) Expire(now time.Time) (item T, key K, ok bool) {
	if at := q.ExpiresAt(); at.IsZero() || now.Before(at) {
		return item, key, false
	}
	return q.Oldest()
}

// Oldest takes out the item that has waited longest, whatever its turn.
func (q *Queue[K, T]) Oldest() (item T, key K, ok bool) {
	if q.oldest == nil {
		return item, key, false
	}
	key = q.oldest.of.key
	return q.remove(q.oldest), key, true
}

// Remove takes out the first item of key that match accepts.
func (q *Queue[K, T]) Remove(key K, match func(T) bool) bool {
	w := q.keys[key]
	if w == nil {
		return false
	}
	for p := w.head; p != nil; p = p.behind {
		if match(p.item) {
			q.remove(p)
			return true
		}
	}
	return false
}

// NextAt gives the moment at which Pop can give something again if nothing is
// unparked and no lane let go: now when a key waits for its turn, the zero time when none will.
func (q *Queue[K, T]) NextAt(now time.Time) time.Time {
	if q.lanes[First].servable() || q.lanes[Second].servable() {
		return now
	}
	if len(q.parked) > 0 {
		return q.parked[0].parkedUntil
	}
	return time.Time{}
}

// ExpiresAt gives the moment at which the oldest item has waited for MaxWait;
// the zero time when nothing will.
func (q *Queue[K, T]) ExpiresAt() time.Time {
	if q.oldest == nil || q.cfg.MaxWait <= 0 {
		return time.Time{}
	}
	return q.oldest.since.Add(q.cfg.MaxWait)
}

// Unpark lets a key be asked again.
func (q *Queue[K, T]) Unpark(key K) {
	if w := q.keys[key]; w != nil {
		q.unpark(w)
	}
}

// UnparkAll lets every key be asked again, after a change of the rules.
func (q *Queue[K, T]) UnparkAll() {
	for _, w := range q.keys {
		q.unpark(w)
	}
}

func (q *Queue[K, T]) wake(now time.Time) {
	for len(q.parked) > 0 && !now.Before(q.parked[0].parkedUntil) {
		q.unpark(q.parked[0])
	}
}

func (q *Queue[K, T]) park(w *waiting[K, T], until time.Time) {
	q.lanes[w.lane].leaveRing(w)
	if w.parkedUntil = until; !until.IsZero() {
		heap.Push(&q.parked, w)
	}
}

func (q *Queue[K, T]) unpark(w *waiting[K, T]) {
	if w.next != nil {
		return
	}
	if w.parkedAt >= 0 {
		heap.Remove(&q.parked, w.parkedAt)
	}
	q.lanes[w.lane].joinRing(w)
}

func (q *Queue[K, T]) changeLane(w *waiting[K, T], to Lane) {
	from := &q.lanes[w.lane]
	ringed := w.next != nil
	if ringed {
		from.leaveRing(w)
	}
	from.leaveLength(w)
	from.findLongest()
	from.items -= w.items
	w.lane = to
	q.lanes[to].items += w.items
	q.lanes[to].joinLength(w)
	if ringed {
		q.lanes[to].joinRing(w)
	}
}

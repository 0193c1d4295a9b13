package admission

import (
	"container/heap"
	"time"
)

// The lists that a Queue is made of. Every item is in two of them, every key in
// up to three; each is left in constant time.

func (q *Queue[K, T]) newKey(key K, l Lane) *waiting[K, T] {
	w := q.freeKeys
	if w == nil {
		w = &waiting[K, T]{}
	} else {
		q.freeKeys = w.next
	}
	*w = waiting[K, T]{key: key, lane: l, parkedAt: -1}
	q.keys[key] = w
	q.lanes[l].joinLength(w)
	q.lanes[l].joinRing(w)
	return w
}

func (q *Queue[K, T]) newPlace(now time.Time, item T) *place[K, T] {
	p := q.freePlaces
	if p == nil {
		p = &place[K, T]{}
	} else {
		q.freePlaces = p.behind
	}
	*p = place[K, T]{item: item, since: now}
	return p
}

// append puts p at the end of w.
func (q *Queue[K, T]) append(w *waiting[K, T], p *place[K, T]) {
	p.of = w
	if p.ahead = w.tail; p.ahead != nil {
		p.ahead.behind = p
	} else {
		w.head = p
	}
	w.tail = p
	if p.older = q.newest; p.older != nil {
		p.older.newer = p
	} else {
		q.oldest = p
	}
	q.newest = p
	q.grow(w, 1)
}

// remove takes p out, and its key with it if that was the last.
func (q *Queue[K, T]) remove(p *place[K, T]) T {
	w, item := p.of, p.item
	if p.ahead != nil {
		p.ahead.behind = p.behind
	} else {
		w.head = p.behind
	}
	if p.behind != nil {
		p.behind.ahead = p.ahead
	} else {
		w.tail = p.ahead
	}
	if p.older != nil {
		p.older.newer = p.newer
	} else {
		q.oldest = p.newer
	}
	if p.newer != nil {
		p.newer.older = p.older
	} else {
		q.newest = p.older
	}
	q.grow(w, -1)
	*p = place[K, T]{behind: q.freePlaces}
	q.freePlaces = p
	if w.items == 0 {
		q.dropKey(w)
	}
	return item
}

func (q *Queue[K, T]) dropKey(w *waiting[K, T]) {
	l := &q.lanes[w.lane]
	l.leaveLength(w)
	if w.next != nil {
		l.leaveRing(w)
	} else if w.parkedAt >= 0 {
		heap.Remove(&q.parked, w.parkedAt)
	}
	delete(q.keys, w.key)
	*w = waiting[K, T]{next: q.freeKeys}
	q.freeKeys = w
}

// grow notes that w has by more items, or less.
func (q *Queue[K, T]) grow(w *waiting[K, T], by int) {
	l := &q.lanes[w.lane]
	l.leaveLength(w)
	w.items += by
	l.items += by
	l.joinLength(w)
	l.findLongest()
}

// joinRing puts w last in the round.
func (l *lane[K, T]) joinRing(w *waiting[K, T]) {
	if l.ready == nil {
		l.ready, w.prev, w.next = w, w, w
		return
	}
	w.next, w.prev = l.ready, l.ready.prev
	w.prev.next, w.next.prev = w, w
}

func (l *lane[K, T]) leaveRing(w *waiting[K, T]) {
	switch {
	case w.next == w:
		l.ready = nil
	case l.ready == w:
		l.ready = w.next
	}
	w.prev.next, w.next.prev = w.next, w.prev
	w.prev, w.next = nil, nil
}

func (l *lane[K, T]) joinLength(w *waiting[K, T]) {
	for len(l.byLength) <= w.items {
		l.byLength = append(l.byLength, nil)
	}
	if w.peerNext = l.byLength[w.items]; w.peerNext != nil {
		w.peerNext.peerPrev = w
	}
	l.byLength[w.items], w.peerPrev = w, nil
	l.longest = max(l.longest, w.items)
}

// leaveLength takes w out of the keys of its length; findLongest follows when
// w has joined another length or is gone.
func (l *lane[K, T]) leaveLength(w *waiting[K, T]) {
	if w.peerPrev != nil {
		w.peerPrev.peerNext = w.peerNext
	} else {
		l.byLength[w.items] = w.peerNext
	}
	if w.peerNext != nil {
		w.peerNext.peerPrev = w.peerPrev
	}
	w.peerPrev, w.peerNext = nil, nil
}

// findLongest corrects longest. Lengths change by one, so it takes one step,
// but when a whole key has left the lane.
func (l *lane[K, T]) findLongest() {
	for l.longest > 0 && l.byLength[l.longest] == nil {
		l.longest--
	}
}

// parkedHeap orders parked keys by the moment they may be asked again.
type parkedHeap[K comparable, T any] []*waiting[K, T]

func (h parkedHeap[K, T]) Len() int           { return len(h) }
func (h parkedHeap[K, T]) Less(i, j int) bool { return h[i].parkedUntil.Before(h[j].parkedUntil) }
func (h parkedHeap[K, T]) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].parkedAt, h[j].parkedAt = i, j
}

// Push is for package heap.
func (h *parkedHeap[K, T]) Push(x any) {
	w, _ := x.(*waiting[K, T])
	w.parkedAt = len(*h)
	*h = append(*h, w)
}

// Pop is for package heap.
func (h *parkedHeap[K, T]) Pop() any {
	last := len(*h) - 1
	w := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	w.parkedAt = -1
	return w
}

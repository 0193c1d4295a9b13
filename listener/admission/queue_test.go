package admission_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"headgate/listener/admission"
)

func anybody(string) (bool, time.Time) { return true, time.Time{} }

// popAll gives the items in the order in which they go.
func popAll(q *admission.Queue[string, string], now time.Time, may func(string) (bool, time.Time)) (list []string) {
	for {
		item, _, ok := q.Pop(now, may)
		if !ok {
			return list
		}
		list = append(list, item)
	}
}

func TestQueueGoesRoundTheKeysAndKeepsTheirOrder(t *testing.T) {
	t.Parallel()
	q := admission.NewQueue[string, string](admission.QueueConfig{})
	for _, item := range []string{"a1", "a2", "a3", "b1", "c1", "c2"} {
		if _, what := q.Push(start(), admission.First, item[:1], item); what != admission.Queued {
			t.Fatalf("%s: %v", item, what)
		}
	}
	if d := cmp.Diff([]string{"a1", "b1", "c1", "a2", "c2", "a3"}, popAll(q, start(), anybody)); d != "" {
		t.Errorf("order (-want +got):\n%s", d)
	}
	if q.Total() != 0 || !q.NextAt(start()).IsZero() || !q.ExpiresAt().IsZero() {
		t.Error("an empty queue has something")
	}
}

// Acceptance 37: the known are served first, and the unknown are never less
// than a fifth.
func TestLanesShareFourToOne(t *testing.T) {
	t.Parallel()
	q := admission.NewQueue[string, string](admission.QueueConfig{})
	push := func(l admission.Lane, n int) {
		for i := range n {
			q.Push(start(), l, fmt.Sprint(l, i%7), fmt.Sprint(l))
		}
	}
	push(admission.Second, 100)
	push(admission.First, 100)
	count := func(n int) (first, second int) {
		for range n {
			item, _, ok := q.Pop(start(), anybody)
			if !ok {
				t.Fatal("nothing to pop")
			}
			if item == fmt.Sprint(admission.First) {
				first++
			} else {
				second++
			}
		}
		return first, second
	}
	if item, _, _ := q.Pop(start(), anybody); item != fmt.Sprint(admission.First) {
		t.Error("the first to go is not of the first lane")
	}
	if first, second := count(100); first != 80 || second != 20 {
		t.Errorf("of 100 the lanes had %d and %d", first, second)
	}
	count(19 + 80) // the first lane is empty, the second alone
	push(admission.First, 20)
	if first, second := count(1); first+second != 1 || q.Len(admission.First) != 19 {
		t.Error("the first lane waits although its turn was not used")
	}
}

func TestStrictLanes(t *testing.T) {
	t.Parallel()
	q := admission.NewQueue[string, string](admission.QueueConfig{Weights: [2]int{1, 0}})
	for i := range 3 {
		q.Push(start(), admission.Second, fmt.Sprint("s", i), "second")
		q.Push(start(), admission.First, fmt.Sprint("f", i), "first")
	}
	want := []string{"first", "first", "first", "second", "second", "second"}
	if d := cmp.Diff(want, popAll(q, start(), anybody)); d != "" {
		t.Errorf("order (-want +got):\n%s", d)
	}
}

func TestKeysOfTheFirstLaneHaveTheirOwnBound(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		cfg           admission.QueueConfig
		first, second int
	}{
		{admission.QueueConfig{CapPerKey: 3, CapFirst: 7}, 7, 3},
		{admission.QueueConfig{CapPerKey: 3}, 3, 3},
		{admission.QueueConfig{Cap: 5, CapPerKey: 3, CapFirst: 7}, 5, 3},
	} {
		for lane, want := range map[admission.Lane]int{admission.First: c.first, admission.Second: c.second} {
			q := admission.NewQueue[string, int](c.cfg)
			for i := range 10 {
				q.Push(start(), lane, "key", i)
			}
			if got := q.LenKey("key"); got != want {
				t.Errorf("%+v: lane %d holds %d of one key, want %d", c.cfg, lane, got, want)
			}
		}
	}
}

func TestFullQueueTakesFromTheLongest(t *testing.T) {
	t.Parallel()
	q := admission.NewQueue[string, string](admission.QueueConfig{Cap: 10, CapPerKey: 6})
	push := func(l admission.Lane, key, item string) string {
		lost, what := q.Push(start(), l, key, item)
		return fmt.Sprint(what, lost)
	}
	for i := range 6 {
		push(admission.Second, "noisy", fmt.Sprint("n", i))
	}
	for i := range 4 {
		push(admission.Second, fmt.Sprint("quiet", i), fmt.Sprint("q", i))
	}
	for _, step := range []struct {
		lane            admission.Lane
		key, item, want string
	}{
		{admission.Second, "noisy", "n6", fmt.Sprint(admission.KeyFull)},
		{admission.Second, "new1", "x", fmt.Sprint(admission.Displaced, "n5")},
		{admission.Second, "new2", "x", fmt.Sprint(admission.Displaced, "n4")},
		{admission.Second, "new3", "x", fmt.Sprint(admission.Displaced, "n3")},
		{admission.Second, "new4", "x", fmt.Sprint(admission.Displaced, "n2")},
		{admission.Second, "new5", "x", fmt.Sprint(admission.Displaced, "n1")},
		{admission.Second, "new6", "x", fmt.Sprint(admission.AllFull)}, // nobody has more than it
	} {
		if got := push(step.lane, step.key, step.item); got != step.want {
			t.Errorf("%s: %q, want %q", step.key, got, step.want)
		}
	}
	for i := range 9 { // the first lane takes its share of the places, and no more
		want := admission.Displaced
		if i >= 8 {
			want = admission.AllFull
		}
		if _, what := q.Push(start(), admission.First, fmt.Sprint("known", i), "k"); what != want {
			t.Errorf("known %d: %v, want %v", i, what, want)
		}
	}
	if f, s := q.Len(admission.First), q.Len(admission.Second); f != 8 || s != 2 {
		t.Errorf("lanes hold %d and %d", f, s)
	}
}

func TestParkedKeysHoldUpNobody(t *testing.T) {
	t.Parallel()
	now := start()
	q := admission.NewQueue[string, string](admission.QueueConfig{MaxWait: 5 * time.Second})
	for _, item := range []string{"late1", "never1", "free1", "late2", "free2"} {
		q.Push(now, admission.Second, item[:len(item)-1], item)
	}
	asked := map[string]int{}
	ready := now.Add(time.Second)
	may := func(key string) (bool, time.Time) {
		asked[key]++
		switch {
		case key == "late" && now.Before(ready):
			return false, ready
		case key == "never":
			return false, time.Time{}
		}
		return true, time.Time{}
	}
	if d := cmp.Diff([]string{"free1", "free2"}, popAll(q, now, may)); d != "" {
		t.Errorf("order (-want +got):\n%s", d)
	}
	popAll(q, now, may)
	if d := cmp.Diff(map[string]int{"late": 1, "never": 1, "free": 2}, asked); d != "" {
		t.Errorf("asked (-want +got):\n%s", d)
	}
	if at := q.NextAt(now); !at.Equal(ready) {
		t.Errorf("next at %v, want %v", at, ready)
	}
	now = ready
	if d := cmp.Diff([]string{"late1", "late2"}, popAll(q, now, may)); d != "" {
		t.Errorf("order (-want +got):\n%s", d)
	}
	if at := q.NextAt(now); !at.IsZero() {
		t.Errorf("next at %v, want never", at)
	}
	q.Unpark("never")
	if at := q.NextAt(now); !at.Equal(now) {
		t.Errorf("next at %v after Unpark, want now", at)
	}
	if _, _, ok := q.Expire(now); ok {
		t.Error("expired too early")
	}
	if at, want := q.ExpiresAt(), start().Add(5*time.Second); !at.Equal(want) {
		t.Errorf("expires at %v, want %v", at, want)
	}
	if item, key, ok := q.Expire(q.ExpiresAt()); !ok || item != "never1" || key != "never" {
		t.Errorf("expired %q of %q, %v", item, key, ok)
	}
}

// model is a queue as plain as possible: one list.
type model struct {
	items []modelItem
	lane  map[int]admission.Lane
}

type modelItem struct {
	key, id int
	since   time.Time
}

func (m *model) count(match func(modelItem) bool) (n int) {
	for _, it := range m.items {
		if match(it) {
			n++
		}
	}
	return n
}

func (m *model) take(id int) modelItem {
	at := slices.IndexFunc(m.items, func(it modelItem) bool { return it.id == id })
	if at < 0 {
		return modelItem{key: -1}
	}
	it := m.items[at]
	m.items = slices.Delete(m.items, at, at+1)
	return it
}

func (m *model) firstOf(key int) int {
	at := slices.IndexFunc(m.items, func(it modelItem) bool { return it.key == key })
	if at < 0 {
		return -1
	}
	return m.items[at].id
}

// TestQueueAgainstModel drives a queue and a list side by side.
func TestQueueAgainstModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, checkQueue)
}

func FuzzQueue(f *testing.F) { f.Fuzz(rapid.MakeFuzz(checkQueue)) }

func checkQueue(t *rapid.T) {
	const limit, perKey, wait = 12, 5, 5 * time.Second
	q := admission.NewQueue[int, int](admission.QueueConfig{Cap: limit, CapPerKey: perKey, MaxWait: wait})
	m := &model{lane: map[int]admission.Lane{}}
	now, next := start(), 0
	blocked := map[int]time.Time{} // keys that may not go before; zero: parked without an end
	keys := rapid.IntRange(0, 5)
	t.Repeat(map[string]func(*rapid.T){
		"push": func(t *rapid.T) {
			key, l := keys.Draw(t, "key"), admission.Lane(rapid.IntRange(0, 1).Draw(t, "lane"))
			full, own := len(m.items) == limit, m.count(func(it modelItem) bool { return it.key == key })
			lost, what := q.Push(now, l, key, next)
			switch what {
			case admission.KeyFull:
				if own < perKey {
					t.Fatalf("key full at %d", own)
				}
				return
			case admission.AllFull:
				if !full {
					t.Fatalf("full at %d", len(m.items))
				}
				return
			case admission.Displaced:
				if it := m.take(lost); it.key < 0 || !full || m.count(func(o modelItem) bool { return o.key == it.key && o.id > it.id }) > 0 {
					t.Fatalf("displaced %d, which is not the newest of its key", lost)
				}
			}
			m.items = append(m.items, modelItem{key, next, now})
			m.lane[key] = l
			next++
		},
		"pop": func(t *rapid.T) {
			asked := map[int]bool{}
			id, key, ok := q.Pop(now, func(k int) (bool, time.Time) {
				if asked[k] {
					t.Fatalf("key %d asked twice", k)
				}
				asked[k] = true
				at, held := blocked[k]
				return !held || (!at.IsZero() && !now.Before(at)), at
			})
			if !ok {
				for _, it := range m.items {
					if at, held := blocked[it.key]; !held || (!at.IsZero() && !now.Before(at)) {
						t.Fatalf("nothing given although key %d may go", it.key)
					}
				}
				return
			}
			if first := m.firstOf(key); first != id {
				t.Fatalf("key %d gave %d before %d", key, id, first)
			}
			m.take(id)
		},
		"block": func(t *rapid.T) {
			at := time.Time{}
			if ms := rapid.IntRange(0, 3000).Draw(t, "ms"); ms > 0 {
				at = now.Add(time.Duration(ms) * time.Millisecond)
			}
			key := keys.Draw(t, "key")
			blocked[key] = at
			q.Unpark(key) // or it stays parked by the old word
		},
		"unblock": func(t *rapid.T) {
			key := keys.Draw(t, "key")
			delete(blocked, key)
			q.Unpark(key)
		},
		"remove": func(t *rapid.T) {
			key := keys.Draw(t, "key")
			nth := rapid.IntRange(0, perKey-1).Draw(t, "nth")
			seen, want := 0, -1
			for _, it := range m.items {
				if it.key == key {
					if seen == nth {
						want = it.id
					}
					seen++
				}
			}
			if got := q.Remove(key, func(id int) bool { return id == want }); got != (want >= 0) {
				t.Fatalf("remove %d: %v", want, got)
			}
			m.take(want)
		},
		"advance": func(t *rapid.T) {
			now = now.Add(time.Duration(rapid.IntRange(0, 2000).Draw(t, "ms")) * time.Millisecond)
			for {
				id, _, ok := q.Expire(now)
				if !ok {
					break
				}
				if it := m.take(id); it.key < 0 || now.Sub(it.since) < wait {
					t.Fatalf("expired %d too early", id)
				}
			}
			if n := m.count(func(it modelItem) bool { return now.Sub(it.since) >= wait }); n > 0 {
				t.Fatalf("%d items outlive their time", n)
			}
		},
		"": func(t *rapid.T) {
			for _, l := range []admission.Lane{admission.First, admission.Second} {
				if got, want := q.Len(l), m.count(func(it modelItem) bool { return m.lane[it.key] == l }); got != want {
					t.Fatalf("lane %d has %d items, want %d", l, got, want)
				}
			}
			for key := range 6 {
				if got, want := q.LenKey(key), m.count(func(it modelItem) bool { return it.key == key }); got != want {
					t.Fatalf("key %d has %d items, want %d", key, got, want)
				}
			}
		},
	})
	q.UnparkAll()
	for len(m.items) > 0 {
		id, _, ok := q.Pop(now, func(int) (bool, time.Time) { return true, time.Time{} })
		if !ok || m.take(id).key < 0 {
			t.Fatalf("at the end: %d, %v; %d items are lost", id, ok, len(m.items))
		}
	}
}

// TestRefusingAllocatesNothing counts on a queue and a table under a flood.
func TestRefusingAllocatesNothing(t *testing.T) { // not parallel: it counts allocations
	now := start()
	table := admission.NewSources(0, admission.SourceRates{Source: admission.Rate{PerSecond: 20, Burst: 40}})
	q := admission.NewQueue[*admission.Source, int](admission.QueueConfig{Cap: 1024, CapPerKey: 128})
	noisy := key(t, "192.0.2.1")
	refuse := func() {
		s := table.Get(now, noisy)
		if table.Take(now, s) {
			return
		}
		if _, what := q.Push(now, admission.Second, s, 1); what != admission.Queued {
			table.Refuse(s, "queue_full")
		}
	}
	for range 1000 {
		refuse()
	}
	if n := testing.AllocsPerRun(1000, refuse); n != 0 {
		t.Errorf("%v allocations for a refusal", n)
	}
	turn := func() {
		if _, s, ok := q.Pop(now, func(*admission.Source) (bool, time.Time) { return true, time.Time{} }); ok {
			q.Push(now, admission.Second, s, 1)
		}
	}
	if n := testing.AllocsPerRun(1000, turn); n != 0 {
		t.Errorf("%v allocations for a turn of the queue", n)
	}
}

func BenchmarkQueue(b *testing.B) {
	q := admission.NewQueue[int, int](admission.QueueConfig{Cap: 1024, CapPerKey: 128, MaxWait: time.Second})
	now, may := start(), func(int) (bool, time.Time) { return true, time.Time{} }
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		q.Push(now, admission.Lane(i&1), i&255, i)
		if i&1 == 0 {
			q.Pop(now, may)
		}
	}
}

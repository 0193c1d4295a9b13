package history_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"headgate/internal/testkit/history"
)

// line makes events with rising times: each is one later than the one before.
type lines []history.Event

func (l *lines) add(events ...history.Event) {
	for _, e := range events {
		if e.T == 0 {
			e.T = int64(len(*l)+1) * 10
		}
		*l = append(*l, e)
	}
}

func judge(t *testing.T, o history.Options, events []history.Event) history.Report {
	t.Helper()
	c := history.NewChecker(o)
	c.AddEvents("memory", events)
	r, err := c.Report()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func submit(op int64, agent string) history.Event {
	return history.Event{Kind: history.KindSubmit, Op: op, Agent: agent, Priority: 5}
}

func acked(op, id int64) history.Event {
	return history.Event{Kind: history.KindAcked, Op: op, ID: id, Status: 202}
}

func start(agent string, id int64, attempt int, epoch int64) history.Event {
	return history.Event{Kind: history.KindStart, Agent: agent, ID: id, Attempt: attempt, Epoch: epoch}
}

func end(agent string, id int64, attempt int) history.Event {
	return history.Event{Kind: history.KindEnd, Agent: agent, ID: id, Attempt: attempt}
}

func final(id int64, agent, outcome string) history.Event {
	return history.Event{Kind: history.KindFinal, ID: id, Agent: agent, State: history.StateCompleted, Outcome: outcome, Places: 1}
}

func keyed(e history.Event, key string) history.Event { e.Key = key; return e }

func once(e history.Event) history.Event { e.Once = true; return e }

// Each rule has histories that it lets pass and histories that it does not.
func TestRules(t *testing.T) {
	t.Parallel()
	boot := history.Event{Kind: history.KindBoot, Agent: "a"}
	for _, c := range []struct {
		name   string
		events []history.Event
		opts   history.Options
		broken []string
	}{
		{"one that runs", []history.Event{submit(1, "a"), acked(1, 7), start("a", 7, 1, 1), end("a", 7, 1), final(7, "a", "succeeded")}, history.Options{}, nil},
		{"acknowledged and gone", []history.Event{submit(1, "a"), acked(1, 7)}, history.Options{}, []string{"lost"}},
		{
			"acknowledged and open",
			[]history.Event{submit(1, "a"), acked(1, 7), {Kind: history.KindFinal, ID: 7, Agent: "a", State: "new", Places: 1}},
			history.Options{},
			[]string{"lost"},
		},
		{
			"open before the end of the run",
			[]history.Event{submit(1, "a"), acked(1, 7), {Kind: history.KindFinal, ID: 7, Agent: "a", State: "new", Places: 1}},
			history.Options{Open: true},
			nil,
		},
		{"unknown and absent", []history.Event{submit(1, "a"), {Kind: history.KindAcked, Op: 1}}, history.Options{}, nil},
		{"unknown and present", []history.Event{submit(1, "a"), final(7, "a", "expired")}, history.Options{}, nil},
		{"unknown and present twice", []history.Event{submit(1, "a"), final(7, "a", "expired"), final(8, "a", "expired")}, history.Options{}, []string{"doubled"}},
		{"nobody's", []history.Event{final(7, "a", "expired")}, history.Options{}, []string{"doubled"}},
		{"somebody else's", []history.Event{final(7, "a", "expired")}, history.Options{Foreign: true}, nil},
		{
			"refused and stored",
			[]history.Event{keyed(submit(1, "a"), "k"), {Kind: history.KindAcked, Op: 1, Status: 422}, keyed(final(7, "a", "expired"), "k")},
			history.Options{Foreign: true},
			[]string{"doubled"},
		},
		{
			"a key that is asked again",
			[]history.Event{
				keyed(submit(1, "a"), "k"),
				{Kind: history.KindAcked, Op: 1},
				keyed(submit(2, "a"), "k"), acked(2, 7), keyed(submit(3, "a"), "k"), acked(3, 7),
				keyed(final(7, "a", "expired"), "k"),
			},
			history.Options{},
			nil,
		},
		{
			"a key with two tasks",
			[]history.Event{keyed(submit(1, "a"), "k"), acked(1, 7), keyed(submit(2, "a"), "k"), acked(2, 8), final(7, "a", "expired"), final(8, "a", "expired")},
			history.Options{},
			[]string{"doubled"},
		},
		{
			"two answers name one task",
			[]history.Event{submit(1, "a"), acked(1, 7), submit(2, "a"), acked(2, 7), final(7, "a", "expired")},
			history.Options{},
			[]string{"doubled"},
		},
		{
			"in the queue and completed",
			[]history.Event{submit(1, "a"), acked(1, 7), {Kind: history.KindFinal, ID: 7, Agent: "a", State: history.StateCompleted, Outcome: "expired", Places: 2}},
			history.Options{},
			[]string{"doubled"},
		},
		{
			"two at once",
			[]history.Event{
				submit(1, "a"), acked(1, 7), submit(2, "a"), acked(2, 8), start("a", 7, 1, 1), start("a", 8, 1, 1), end("a", 7, 1), end("a", 8, 1),
				final(7, "a", "failed"), final(8, "a", "failed"),
			},
			history.Options{},
			[]string{"slot"},
		},
		{
			"two at once, the first without an end",
			[]history.Event{
				submit(1, "a"), acked(1, 7), submit(2, "a"), acked(2, 8), start("a", 7, 1, 1), start("a", 8, 1, 1), end("a", 8, 1), boot,
				final(7, "a", "unknown"), final(8, "a", "failed"),
			},
			history.Options{},
			[]string{"slot"},
		},
		{
			"one after a restart",
			[]history.Event{
				submit(1, "a"), acked(1, 7), submit(2, "a"), acked(2, 8), start("a", 7, 1, 1), boot, start("a", 8, 1, 1), end("a", 8, 1),
				final(7, "a", "unknown"), final(8, "a", "failed"),
			},
			history.Options{},
			nil,
		},
		{
			"an end that was noticed late",
			[]history.Event{
				submit(1, "a"), acked(1, 7), submit(2, "a"), acked(2, 8), start("a", 7, 1, 1), start("a", 8, 1, 1), end("a", 8, 1),
				{Kind: history.KindEnd, Agent: "a", ID: 7, Attempt: 1, Since: 52},
				final(7, "a", "unknown"), final(8, "a", "failed"),
			},
			history.Options{},
			nil,
		},
		{
			"out of order",
			[]history.Event{
				submit(1, "a"), acked(1, 7), submit(2, "a"), acked(2, 8), start("a", 8, 1, 1), end("a", 8, 1), start("a", 7, 1, 1), end("a", 7, 1),
				final(7, "a", "failed"), final(8, "a", "failed"),
			},
			history.Options{},
			[]string{"order"},
		},
		{
			"tried again after a restart of its agent",
			[]history.Event{
				submit(1, "a"), acked(1, 7), submit(2, "a"), acked(2, 8), boot, start("a", 8, 1, 1), end("a", 8, 1), start("a", 7, 2, 1), end("a", 7, 2),
				final(7, "a", "failed"), final(8, "a", "failed"),
			},
			history.Options{},
			nil,
		},
		{
			"tried again without one",
			[]history.Event{
				submit(1, "a"), acked(1, 7), submit(2, "a"), acked(2, 8), start("a", 8, 1, 1), end("a", 8, 1), start("a", 7, 2, 1), end("a", 7, 2),
				final(7, "a", "failed"), final(8, "a", "failed"),
			},
			history.Options{},
			[]string{"order"},
		},
		{
			"sent at the same time",
			[]history.Event{
				submit(1, "a"), submit(2, "a"), acked(1, 7), acked(2, 8), start("a", 8, 1, 1), end("a", 8, 1), start("a", 7, 1, 1), end("a", 7, 1),
				final(7, "a", "failed"), final(8, "a", "failed"),
			},
			history.Options{},
			nil,
		},
		{
			"sent by a call that was never answered",
			[]history.Event{
				keyed(submit(2, "a"), "k"), submit(1, "a"), acked(1, 8), keyed(submit(3, "a"), "k"), acked(3, 7), start("a", 7, 1, 1), end("a", 7, 1),
				start("a", 8, 1, 1), end("a", 8, 1), final(8, "a", "failed"), keyed(final(7, "a", "failed"), "k"),
			},
			history.Options{},
			nil,
		},
		{
			"once, twice",
			[]history.Event{once(submit(1, "a")), acked(1, 7), start("a", 7, 1, 1), boot, start("a", 7, 2, 1), end("a", 7, 2), final(7, "a", "failed")},
			history.Options{},
			[]string{"once"},
		},
		{
			"an attempt that began twice",
			[]history.Event{submit(1, "a"), acked(1, 7), start("a", 7, 1, 1), boot, start("a", 7, 1, 1), end("a", 7, 1), final(7, "a", "failed")},
			history.Options{},
			[]string{"repeat"},
		},
		{"success without a run", []history.Event{submit(1, "a"), acked(1, 7), final(7, "a", "succeeded")}, history.Options{}, []string{"repeat"}},
		{"ran, and on no disk", []history.Event{submit(1, "a"), start("a", 7, 1, 1), end("a", 7, 1)}, history.Options{}, []string{"repeat"}},
		{
			"a lower epoch",
			[]history.Event{
				submit(1, "a"), acked(1, 7), submit(2, "a"), acked(2, 8), start("a", 7, 1, 4), end("a", 7, 1), start("a", 8, 1, 3), end("a", 8, 1),
				final(7, "a", "failed"), final(8, "a", "failed"),
			},
			history.Options{},
			[]string{"epoch"},
		},
		{
			"told twice",
			[]history.Event{
				submit(1, "a"), acked(1, 7),
				{Kind: history.KindWait, Waiter: "w", ID: 7},
				{Kind: history.KindTold, Waiter: "w", ID: 7, Outcome: "expired"},
				{Kind: history.KindTold, Waiter: "w", ID: 7, Outcome: "expired"},
				final(7, "a", "expired"),
			},
			history.Options{},
			[]string{"waiter"},
		},
		{
			"never told",
			[]history.Event{submit(1, "a"), acked(1, 7), {Kind: history.KindWait, Waiter: "w", ID: 7}, final(7, "a", "expired")},
			history.Options{},
			[]string{"waiter"},
		},
		{
			"gave up waiting",
			[]history.Event{submit(1, "a"), acked(1, 7), {Kind: history.KindWait, Waiter: "w", ID: 7}, {Kind: history.KindLeft, Waiter: "w", ID: 7}, final(7, "a", "expired")},
			history.Options{},
			nil,
		},
		{
			"told before the end",
			[]history.Event{
				submit(1, "a"), acked(1, 7), start("a", 7, 1, 1),
				{Kind: history.KindTold, Waiter: "w", ID: 7, Outcome: "succeeded"},
				end("a", 7, 1),
				final(7, "a", "succeeded"),
			},
			history.Options{},
			[]string{"waiter"},
		},
		{
			"told what is not on disk",
			[]history.Event{
				submit(1, "a"), acked(1, 7),
				{Kind: history.KindTold, Waiter: "w", ID: 7, Outcome: "expired"},
				{Kind: history.KindFinal, ID: 7, Agent: "a", State: "new", Places: 1},
			},
			history.Options{Open: true},
			[]string{"final", "waiter"},
		},
		{
			"a stream with a gap",
			[]history.Event{{Kind: history.KindFollow, Waiter: "s"}, submit(1, "a"), acked(1, 7), final(7, "a", "expired")},
			history.Options{},
			[]string{"waiter"},
		},
		{
			"a stream that said reset",
			[]history.Event{{Kind: history.KindFollow, Waiter: "s"}, submit(1, "a"), acked(1, 7), {Kind: history.KindReset, Waiter: "s"}, final(7, "a", "expired")},
			history.Options{},
			nil,
		},
		{
			"another end",
			[]history.Event{
				submit(1, "a"), acked(1, 7), {Kind: history.KindSeen, ID: 7, State: history.StateCompleted, Outcome: "expired"}, final(7, "a", "cancelled"),
			},
			history.Options{},
			[]string{"final"},
		},
		{
			"completed and open again",
			[]history.Event{
				submit(1, "a"), acked(1, 7),
				{Kind: history.KindSeen, ID: 7, State: history.StateCompleted, Outcome: "expired"},
				{Kind: history.KindSeen, ID: 7, Since: 35, State: "new"},
				final(7, "a", "expired"),
			},
			history.Options{},
			[]string{"final"},
		},
		{
			"a read that began before the end",
			[]history.Event{
				submit(1, "a"), acked(1, 7),
				{Kind: history.KindSeen, ID: 7, State: history.StateCompleted, Outcome: "expired"},
				{Kind: history.KindSeen, ID: 7, Since: 25, State: "new"},
				final(7, "a", "expired"),
			},
			history.Options{},
			nil,
		},
		{
			"waits after the healing",
			[]history.Event{
				submit(1, "a"), acked(1, 7),
				{Kind: history.KindHealed},
				{T: int64(time.Minute), Kind: history.KindFinal, ID: 7, Agent: "a", State: "new", Places: 1},
			},
			history.Options{Open: true, Settle: 30 * time.Second},
			[]string{"liveness"},
		},
		{
			"pauses after its second attempt",
			[]history.Event{
				submit(1, "a"), acked(1, 7), start("a", 7, 2, 1), end("a", 7, 2),
				{Kind: history.KindHealed},
				{T: int64(time.Minute), Kind: history.KindFinal, ID: 7, Agent: "a", State: "new", Places: 1},
			},
			history.Options{Open: true, Settle: 30 * time.Second, Pause: time.Minute},
			nil,
		},
		{
			"has no reason to pause",
			[]history.Event{
				submit(1, "a"), acked(1, 7), start("a", 7, 1, 1), end("a", 7, 1),
				{Kind: history.KindHealed},
				{T: int64(time.Minute), Kind: history.KindFinal, ID: 7, Agent: "a", State: "new", Places: 1},
			},
			history.Options{Open: true, Settle: 30 * time.Second, Pause: time.Minute},
			[]string{"liveness"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var l lines
			l.add(c.events...)
			r := judge(t, c.opts, l)
			if diff := cmp.Diff(c.broken, r.Broken()); diff != "" {
				t.Errorf("rules broken (-want +got):\n%s\n%s", diff, r)
			}
			for _, v := range r.Violations {
				if len(v.Proof) == 0 || v.Proof[0].Text == "" {
					t.Errorf("no lines prove: %s", v)
				}
			}
		})
	}
}

// The rows of one task, transaction after transaction.
func TestShadowRows(t *testing.T) {
	t.Parallel()
	row := func(tx int64, action, table string, attempt int) history.Event {
		return history.Event{Kind: history.KindRow, Op: tx, ID: 7, Action: action, Table: table, Attempt: attempt}
	}
	stored := []history.Event{row(1, "INSERT", "agent_queue", 1), row(1, "INSERT", "agent_task", 0)}
	ended := []history.Event{row(2, "DELETE", "agent_queue", 1), row(2, "INSERT", "agent_result", 1)}
	for _, c := range []struct {
		name   string
		rows   []history.Event
		broken []string
	}{
		{"from the queue to its result", slices.Concat(stored, ended), nil},
		{"back and started again", slices.Concat(stored, []history.Event{row(2, "UPDATE", "agent_queue", 1), row(3, "UPDATE", "agent_queue", 2)}), nil},
		{"back for later", slices.Concat(stored, []history.Event{row(2, "DELETE", "agent_queue", 1), row(2, "INSERT", "agent_later", 1)}), nil},
		{"in the queue after its result", slices.Concat(stored, ended, []history.Event{row(3, "INSERT", "agent_queue", 1)}), []string{"final"}},
		{"a result that is changed", slices.Concat(stored, ended, []history.Event{row(3, "UPDATE", "agent_result", 1)}), []string{"final"}},
		{"nowhere", slices.Concat(stored, []history.Event{row(2, "DELETE", "agent_queue", 1)}), []string{"final"}},
		{"in two places", slices.Concat(stored, []history.Event{row(2, "INSERT", "agent_later", 1)}), []string{"final"}},
		{"an attempt that falls", slices.Concat(stored, []history.Event{row(2, "UPDATE", "agent_queue", 0)}), []string{"final"}},
		{"an attempt that is left out", slices.Concat(stored, []history.Event{row(2, "UPDATE", "agent_queue", 3)}), []string{"final"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var l lines
			l.add(c.rows...)
			if r := judge(t, history.Options{Foreign: true}, l); !cmp.Equal(c.broken, r.Broken()) {
				t.Errorf("got %s; want %v broken", r, c.broken)
			}
		})
	}
}

// A process that is killed leaves whole lines and at most one that is torn;
// the next one in the same file goes on after it.
func TestFileSurvivesKill(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "h.jsonl")
	for range 3 {
		child := exec.Command(os.Args[0], "-test.run=^TestChildWrites$")
		child.Env = append(os.Environ(), "HISTORY_CHILD="+path)
		out, err := child.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 1)
		if _, err := out.Read(b); err != nil { // it has written some
			t.Fatal(err)
		}
		if err := child.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = child.Wait()
		// A line that is torn for certain.
		f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(`{"t":1,"k":"sub`); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	r, err := history.Check([]string{path}, history.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if r.Torn != 3 || r.Submitted < 3000 || r.Unknown != r.Submitted || r.Err() != nil {
		t.Errorf("got %s", r)
	}
}

// TestChildWrites is the process of TestFileSurvivesKill.
func TestChildWrites(t *testing.T) { //nolint:paralleltest // a process of its own
	path := os.Getenv("HISTORY_CHILD")
	if path == "" {
		t.Skip("only as a child")
	}
	w, err := history.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	for n := 0; ; n++ {
		w.Submit(history.Submission{Agent: "a", Key: strings.Repeat("k", n%200)})
		if n == 1000 {
			_, _ = os.Stdout.WriteString("x")
		}
	}
}

// A line in the middle that is no event is an error, not a violation: such a
// history proves nothing.
func TestSpoiledFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "h.jsonl")
	if err := os.WriteFile(path, []byte("{\"t\":1,\"k\":\"open\"}\nnonsense\n{\"t\":2,\"k\":\"fault\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := history.Check([]string{path}, history.Options{}); err == nil || !strings.Contains(err.Error(), ":2:") {
		t.Errorf("got %v; want an error that names line 2", err)
	}
}

// Files may come in any order: an agent's end may be read before its begin.
func TestOrderOfFiles(t *testing.T) {
	t.Parallel()
	a := []history.Event{{T: 1, Kind: history.KindSubmit, Op: 1, Agent: "a"}, {T: 2, Kind: history.KindAcked, Op: 1, ID: 7, Status: 202}}
	b := []history.Event{{T: 3, Kind: history.KindStart, Agent: "a", ID: 7, Attempt: 1, Epoch: 1}}
	c := []history.Event{{T: 4, Kind: history.KindEnd, Agent: "a", ID: 7, Attempt: 1}}
	d := []history.Event{{T: 5, Kind: history.KindFinal, Agent: "a", ID: 7, State: history.StateCompleted, Outcome: "succeeded", Places: 1}}
	for _, files := range [][][]history.Event{{a, b, c, d}, {d, c, b, a}, {c, a, d, b}} {
		k := history.NewChecker(history.Options{})
		for i, f := range files {
			k.AddEvents(string(rune('a'+i)), f)
		}
		r, err := k.Report()
		if err != nil || r.Err() != nil || r.Acked != 1 || r.Runs != 1 {
			t.Errorf("got %s, %v", r, err)
		}
	}
}
